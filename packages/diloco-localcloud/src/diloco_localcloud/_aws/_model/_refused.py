"""The error for a request that AWS refuses."""

from __future__ import annotations


class RefusedError(Exception):
    """One of AWS's errors, as its JSON services word it.

    Attributes:
        code: such as ``ValidationException``; botocore calls it ``Error.Code``.
        message: the text.
        status: the HTTP status.
    """

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = status


def invalid(message: str) -> RefusedError:
    """Return a ``ValidationException``: SageMaker's error for a bad request or an unknown job."""
    return RefusedError("ValidationException", message)


def wrong_parameter(message: str) -> RefusedError:
    """Return an ``InvalidParameterException``: CloudWatch Logs' error for a bad request."""
    return RefusedError("InvalidParameterException", message)


def throttled() -> RefusedError:
    """Return the error for too many requests."""
    return RefusedError("ThrottlingException", "Rate exceeded")
