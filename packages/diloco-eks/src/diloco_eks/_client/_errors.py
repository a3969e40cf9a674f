"""Translating failed calls to the cluster into the protocol's errors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from diloco_protocol import (
    AuthError,
    BackendError,
    ForbiddenError,
    InvalidRequestError,
    QuotaExceededError,
    ReplicaNotFoundError,
    ThrottledError,
    UnavailableError,
)
from diloco_protocol.backend import redact_and_cut

from .._state._reading import mapping, text_of

_MISSING_RIGHT = re.compile(r'cannot \w+ resource "')
RESTRICTED = 'PodSecurity "restricted:'  # words of a namespace that requires this standard
_WARNING = re.compile(r'299 \S+ "((?:[^"\\]|\\.)*)"')


class MissingError(ReplicaNotFoundError):
    """Raised when the cluster has no such object (404).

    Attributes:
        about: The resource and the name of the missing object, in the cluster's words; empty where
            the cluster does not say.
    """

    about: tuple[str, str] = "", ""


class ConflictError(BackendError):
    """Raised when an object exists, changed since it was read, or is not the one meant (409)."""


class NoLogError(UnavailableError):
    """Raised when a node says that it has no log of a pod that is there.

    The log is gone, or cannot be read just now.
    """


class UnreachedError(UnavailableError):
    """Raised when there was no connection, so the request was not sent."""


class SilentError(UnavailableError):
    """Raised when an answer, or its next piece, did not come in time."""


class MissingRightError(ForbiddenError):
    """Raised when no role allows a call (a 403 of RBAC, and not of a policy)."""


class BadRequestError(InvalidRequestError):
    """Raised when the cluster does not understand a request, or cannot answer it yet (400)."""


def read_warnings(headers: Mapping[str, str]) -> list[str]:
    """Return the server's warnings, as a log can show them.

    https://kubernetes.io/blog/2020/09/03/warnings/
    """
    return [
        printable(redact_and_cut(re.sub(r"\\(.)", r"\1", text), 1000))
        for name, value in headers.items()
        if name.lower() == "warning"
        for text in _WARNING.findall(value)
    ]


def printable(text: str) -> str:
    """Return a text for a log, with unprintable characters as Python writes them."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def warn(text: str) -> None:
    """Log a warning as one line, even if others have put line ends into it."""
    import logging  # slow to import

    logging.getLogger("diloco_eks").warning("%s", printable(text))


def to_error(what: str, status: int, body: bytes, headers: Mapping[str, str]) -> BackendError:
    """Return the error for an answer that reports a failure.

    https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/status/

    Args:
        what: What was tried, as in ``"read Job a/b"``.
        status: The HTTP status.
        body: The body of the answer.
        headers: Its headers.
    """
    shown = body.decode(errors="replace")
    try:
        data = mapping(json.loads(shown))
    except (ValueError, RecursionError):
        data = {}
    details = mapping(data.get("details"))
    # Kubernetes' word, such as AlreadyExists: only with it the words are the cluster's own.
    reason = text_of(data.get("reason")) if data.get("kind") == "Status" else ""
    message = text_of(data.get("message")) or redact_and_cut(shown.strip(), 500)
    text = f"cannot {what}: {message or f'HTTP status {status}'}"
    if status == 400:
        return BadRequestError(text) if reason else InvalidRequestError(text + _not_its_own(status))
    if status == 401:
        return AuthError(
            f"{text}. The cluster refused the credentials, and again after they were loaded anew: "
            "log in again, or choose another context=",
            retryable=True,  # the credentials may be about to be renewed
        )
    if status == 403:
        if "exceeded quota" in message:
            return QuotaExceededError(text)
        if _MISSING_RIGHT.search(message):
            return MissingRightError(
                f"{text}. The README of diloco-eks has the Role that is needed"
            )
        return ForbiddenError(text if reason else f"{text}{_not_its_own(status)}")
    if status in {404, 409, 410}:
        # An answer about an object counts as the cluster's own only if it has a reason: a proxy
        # sends status codes of its own.
        if status == 404 and reason == "NotFound":
            missing = MissingError(text)
            missing.about = text_of(details.get("kind")), text_of(details.get("name"))
            return missing
        if status == 409 and reason:
            return ConflictError(text)
        if status == 410 and reason:
            return UnavailableError(text)  # reading a list took so long that it has to begin anew
        return UnavailableError(f"{text}{_not_its_own(status)}")
    if status == 429:
        pause = headers.get("Retry-After") or details.get("retryAfterSeconds")
        return ThrottledError(text, retry_after=_seconds(pause))
    if status >= 500:
        return UnavailableError(text)
    if status in {413, 415, 422}:
        return InvalidRequestError(text)
    if not reason:  # such as the redirection to a page where one logs in
        return UnavailableError(f"{text}{_not_its_own(status)}")
    return BackendError(text)


def _not_its_own(status: int) -> str:
    return (
        f". This answer (status {status}) is not the cluster's own: look at what stands between, "
        "such as a proxy"
    )


def _seconds(value: object) -> float | None:
    try:
        seconds = float(str(value))
    except ValueError:
        return None
    return seconds if 0 <= seconds < 86400 else None
