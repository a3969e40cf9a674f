"""A request that AWS refuses."""

from __future__ import annotations


class RefusedError(Exception):
    """One of AWS's errors, as its JSON services word it.

    Attributes:
        code: such as ``ValidationException``; what botocore has as ``Error.Code``.
        message: the text.
        status: of HTTP.
    """

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = status


def invalid(message: str) -> RefusedError:
    """A ``ValidationException``: SageMaker's word for bad requests and for jobs that do not exist."""
    return RefusedError("ValidationException", message)


def wrong_parameter(message: str) -> RefusedError:
    """An ``InvalidParameterException``: CloudWatch Logs' word for bad requests."""
    return RefusedError("InvalidParameterException", message)


def throttled() -> RefusedError:
    """Too many requests."""
    return RefusedError("ThrottlingException", "Rate exceeded")
