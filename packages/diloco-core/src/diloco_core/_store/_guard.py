"""Opening a store in limited time, and keeping its secrets out of all messages.

The time is limited whatever the driver does.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import TypeVar
from urllib.parse import urlsplit

from fsspec.config import conf

from .._errors import ConfigurationError, StoreUnavailableError
from .._redact import redact, redact_uri

T = TypeVar("T")

OPENING_SECONDS = 100.0
"""How long opening a store may take, including all that its driver tries by itself."""
CONNECT_SECONDS = 5
"""How long it may take to make a connection."""
ANSWER_SECONDS = 30
"""How long a store may send nothing in the middle of a request."""

_SECRETS = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_SAS_TOKEN",
)
S3 = {"s3", "s3a"}
"""The schemes of S3."""
# All characters that a URL may hold, except those that begin a query string or a fragment: keys are
# appended to it.
_URL = re.compile(r"https?://[A-Za-z0-9%:/@!$&'()*+,;=._~\[\]-]+", re.IGNORECASE)
S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""The variables that name the endpoint of S3; the first one that is set counts."""
_ENDPOINTS = {
    **dict.fromkeys(S3, S3_ENDPOINTS),
    **dict.fromkeys(("gs", "gcs"), ("STORAGE_EMULATOR_HOST",)),
}


def endpoint(uri: str) -> str:
    """Return the endpoint to which the requests for a URI go, without secrets.

    The driver is not asked; if it finds one by itself, that is said instead.
    """
    scheme = uri.partition("://")[0].rpartition("+")[2]
    settings = conf.get(scheme, {})
    client_settings = settings.get("client_kwargs") or {}
    candidates = [settings.get("endpoint_url"), client_settings.get("endpoint_url")]
    candidates += [os.environ.get(name) for name in _ENDPOINTS.get(scheme, ())]
    candidates += [
        part.removeprefix("BlobEndpoint=")
        for part in os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";")
        if part.startswith("BlobEndpoint=") and scheme in {"az", "abfs", "abfss"}
    ]
    url = next((str(url) for url in candidates if url), "")
    return redact_uri(url) if url else f"the one that the driver for {scheme}:// finds by itself"


def check_endpoint(scheme: str, *, empty: bool = True) -> None:
    """Refuse environment variables for the endpoint that do not hold a URL.

    This comes before anything is opened, since some drivers crash on such a value.

    Args:
        scheme: The scheme of the store's URI, without the name of a driver.
        empty: Whether the driver treats an empty variable like one that is not set.

    Raises:
        ConfigurationError: A variable does not hold a URL; the error names it.
    """
    for name in S3_ENDPOINTS if scheme in S3 else ():
        value = os.environ.get(name)
        if value is None or (not value and empty) or _is_url(value):
            continue
        raise ConfigurationError(
            f"{name} must be a URL such as https://host or http://host:9000, not "
            f"{redact_uri(value)!r}. In a user name or a password, write / ? # @ as %2F, %3F, %23 "
            "and %40. Unset it to use the endpoint that belongs to the region."
        )


def _is_url(value: str) -> bool:
    if not _URL.fullmatch(value):
        return False
    try:
        parts = urlsplit(value)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is wrong, or the address in brackets
        return False


def without_secrets(text: str, uri: str) -> str:
    """Return a driver's text without the secrets of the URI, endpoints and the environment."""
    return redact(text, *_secret_uris(uri))


def without_secrets_in(error: BaseException, uri: str) -> BaseException:
    """Return an error that may be shown as the cause of another.

    It is ``error`` itself, if neither it nor its causes hold a secret.
    """
    texts = [f"{link} {link!r}" for link in _chain(error)]
    if all(without_secrets(text, uri) == text for text in texts):
        return error
    return DriverError(f"{type(error).__name__}: {without_secrets(str(error), uri)}")


def cannot_open(uri: str, error: BaseException, why: str = "") -> StoreUnavailableError:
    """The error for a store that its driver cannot open, and never will."""
    shown = f"{why}{type(error).__name__}: {without_secrets(str(error), uri)}"
    return StoreUnavailableError(f"{redact_uri(uri)} cannot be opened ({shown})", lasting=True)


class DriverError(Exception):
    """The replacement of a driver's error that holds a secret, in its text or that of a cause."""


def in_time(act: Callable[[], T], uri: str, seconds: float) -> T:
    """Call ``act``, for at most so many seconds. Returns what it returns.

    Raises:
        StoreUnavailableError: It has not returned after so many seconds. It goes on in a daemon
            thread.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # noqa: BLE001 - for the thread that waits
            future.set_exception(error)

    threading.Thread(target=run, name="diloco-open", daemon=True).start()
    if not wait([future], seconds).done:
        raise StoreUnavailableError(
            f"{redact_uri(uri)} cannot be opened: the store did not answer within {seconds:g} s. "
            f"Its endpoint is {endpoint(uri)}: check that this is the right one, and that this "
            "machine can reach it."
        )
    return future.result()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    pending = [error]
    while pending:
        link = pending.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            pending += [link.__cause__, link.__context__]


def _secret_uris(uri: str) -> list[str]:
    values = [os.environ[name] for name in _SECRETS if os.environ.get(name)]
    # A connection string consists of several values, and drivers hardly ever show it as a whole.
    values += [
        value
        for text in values
        for part in text.split(";")
        if (value := part.partition("AccountKey=")[2])
    ]
    urls = [
        os.environ[name] for names in _ENDPOINTS.values() for name in names if os.environ.get(name)
    ]
    return [uri, *urls, *(f"secret://:{value}@" for value in values)]
