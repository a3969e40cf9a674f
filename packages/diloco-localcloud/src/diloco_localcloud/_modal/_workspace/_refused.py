"""What a workspace refuses."""


class RefusedError(Exception):
    """A request is refused.

    Attributes:
        code: the name of a status of gRPC, such as ``NOT_FOUND``.
        message: what the client is told.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def not_found(message: str) -> RefusedError:
    """There is no such object."""
    return RefusedError("NOT_FOUND", message)
