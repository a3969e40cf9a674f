"""Modal's errors, as those of the protocol; and a deadline of ours for every call."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import TypeVar

from diloco_protocol import (
    AuthError,
    BackendError,
    ForbiddenError,
    InvalidRequestError,
    ThrottledError,
    UnavailableError,
)

T = TypeVar("T")
_NO_ENVIRONMENT = re.compile(r"\bEnvironment '([^']*)' (not found|does not exist)")
_UNSENDABLE = "Invalid metadata value"  # and then the value, which may be a token


class MissingError(BackendError):
    """Raised when Modal does not know what it was asked about."""


class DenseLogError(BackendError):
    """Raised when so long or so full a stretch of a log is not read at once, by Modal's client or by us."""


def bounded(call: Callable[[], T], seconds: float, what: str) -> T:
    """What ``call`` returns or raises, unless it takes longer than that.

    The client itself takes up to a minute to say that a server is gone. What a call would still do
    is left to a thread that nobody waits for.

    Raises:
        UnavailableError: The time is up.
    """
    answer: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            answer.append(call())
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that asks
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True, name="diloco-modal")
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure.pop()  # kept here, it would keep all that its traceback holds
    if answer:
        return answer[0]
    raise UnavailableError(f"Modal did not answer within {seconds:g} s ({what})")


def shown_cause(error: Exception) -> Exception | None:
    """The same error, as the cause of one of ours; None if its text may be a token, which a traceback would show."""
    return None if str(error).startswith(_UNSENDABLE) else error


def meant(error: Exception, what: str) -> BackendError:
    """The protocol's error for one that Modal's client has raised."""
    from grpclib.exceptions import ProtocolError, StreamTerminatedError
    from modal import exception as modal_errors

    text = f"{what}: {error}"
    if isinstance(error, BackendError):
        return error
    if shown_cause(error) is None:
        return AuthError(
            f"{what}: a token that was given to Modal's client has a character that cannot be "
            "sent, such as a line end"
        )
    if (
        found := _NO_ENVIRONMENT.search(str(error))
    ) is not None:  # nothing is said of what it was asked about
        return InvalidRequestError(
            f"{text.rstrip('.')}. 'modal environment list' shows those that are there, and 'modal "
            f"environment create {found[1]}' makes one"
        )
    if isinstance(error, (modal_errors.NotFoundError, modal_errors.OutputExpiredError)):
        return MissingError(text)
    if isinstance(error, modal_errors.ResourceExhaustedError):
        return ThrottledError(text)
    if isinstance(error, modal_errors.AuthError):
        return AuthError(
            f"{text.rstrip('.')}. Run 'modal token new', or set MODAL_TOKEN_ID and "
            "MODAL_TOKEN_SECRET"
        )
    if isinstance(error, modal_errors.PermissionDeniedError):
        return ForbiddenError(text)
    if isinstance(
        error,
        (
            modal_errors.ServiceError,
            modal_errors.InternalError,
            modal_errors.ConnectionError,
            modal_errors.ClientClosed,
        ),
    ):
        return UnavailableError(text)
    # A connection that is cut reaches the caller as it is.
    if isinstance(error, (StreamTerminatedError, ProtocolError)):
        return UnavailableError(f"{what}: {type(error).__name__}: {error}")
    if isinstance(error, modal_errors.LogsFetchError):
        return DenseLogError(text)
    if isinstance(error, modal_errors.InvalidError):
        return InvalidRequestError(text)
    text = f"{what}: {type(error).__name__}: {error}"
    # Streams of the client pass on what the network says, such as ConnectionRefusedError.
    return UnavailableError(text) if isinstance(error, OSError) else BackendError(text)
