"""Modal's errors translated into those of the protocol, and a deadline for every call."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
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
_UNSENDABLE = "Invalid metadata value"  # the value follows, which may be a token


class MissingError(BackendError):
    """Raised when Modal does not know the object that it was asked about."""


class DenseLogError(BackendError):
    """Raised when a stretch of a log is too long or too full to be read at once.

    Either Modal's client or diloco has refused to read it.
    """


_MEANT: Mapping[str, type[BackendError]] = {
    "NotFoundError OutputExpiredError": MissingError,
    "ResourceExhaustedError": ThrottledError,
    "PermissionDeniedError": ForbiddenError,
    "ServiceError InternalError ConnectionError ClientClosed": UnavailableError,
    "LogsFetchError": DenseLogError,
    "InvalidError": InvalidRequestError,
}
"""What errors of Modal's client mean, by their names."""


def bounded(call: Callable[[], T], seconds: float, what: str) -> T:
    """Return or raise what ``call`` does, unless it takes longer than ``seconds``.

    The client itself takes up to a minute to report that a server is gone. A call that takes longer
    goes on in a thread for which nothing waits.

    Raises:
        UnavailableError: The time is up.
    """
    answer: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            answer.append(call())
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True, name="diloco-modal")
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure.pop()  # a list with it would keep all that its traceback holds
    if answer:
        return answer[0]
    raise UnavailableError(f"Modal did not answer within {seconds:g} s ({what})")


def shown_cause(error: Exception) -> Exception | None:
    """Return the error, to be the cause of one of diloco's.

    None if its text may contain a token, which a traceback would show.
    """
    return None if str(error).startswith(_UNSENDABLE) else error


def meant(error: Exception, what: str) -> BackendError:
    """Return the protocol's error for one that Modal's client has raised."""
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
        match := _NO_ENVIRONMENT.search(str(error))
    ) is not None:  # says nothing about the object that was asked for
        return InvalidRequestError(
            f"{text.rstrip('.')}. 'modal environment list' shows those that are there, and 'modal "
            f"environment create {match[1]}' makes one"
        )
    if isinstance(error, modal_errors.AuthError):
        return AuthError(
            f"{text.rstrip('.')}. Run 'modal token new', or set MODAL_TOKEN_ID and "
            "MODAL_TOKEN_SECRET"
        )
    # Modal's client does not translate the errors of a broken connection.
    if isinstance(error, (StreamTerminatedError, ProtocolError)):
        return UnavailableError(f"{what}: {type(error).__name__}: {error}")
    for names, kind in _MEANT.items():
        if isinstance(error, tuple(getattr(modal_errors, name) for name in names.split())):
            return kind(text)
    text = f"{what}: {type(error).__name__}: {error}"
    # Streams of the client pass on errors of the network, such as ConnectionRefusedError.
    return UnavailableError(text) if isinstance(error, OSError) else BackendError(text)
