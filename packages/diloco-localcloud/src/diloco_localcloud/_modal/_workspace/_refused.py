"""The error for a request that a workspace refuses."""


class RefusedError(Exception):
    """The refusal of a request.

    Attributes:
        code: the name of a status of gRPC, such as ``NOT_FOUND``.
        message: the message to the client.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def not_found(message: str) -> RefusedError:
    """Return the error for an object that does not exist."""
    return RefusedError("NOT_FOUND", message)
