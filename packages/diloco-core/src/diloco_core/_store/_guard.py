"""Opening a store within bounded time, whatever its driver does, and without its secrets in any message."""

from __future__ import annotations

import os
import re
import threading
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from fsspec.config import conf

from .._errors import ConfigurationError, StoreUnavailableError
from .._redact import redact, redact_uri

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

OPENING_SECONDS = 100.0
"""How long opening a store may take, with everything that its driver tries by itself."""
CONNECT_SECONDS = 5
"""How long a connection may take to come about."""
ANSWER_SECONDS = 30
"""How long a store may keep silent in the middle of a request."""

_SECRETS = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_SAS_TOKEN",
)
_S3 = {"s3", "s3a"}
# The signs that a URL may hold, without those of query strings and fragments: keys come behind it.
_URL = re.compile(r"https?://[A-Za-z0-9%:/@!$&'()*+,;=._~\[\]-]+", re.IGNORECASE)
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "s3a": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("STORAGE_EMULATOR_HOST",),
    "gcs": ("STORAGE_EMULATOR_HOST",),
}


def endpoint(uri: str) -> str:
    """Where the requests for a URI go, as far as that can be known without its driver; without secrets."""
    scheme = uri.partition("://")[0].rpartition("+")[2]
    settings = conf.get(scheme, {})
    inner = settings.get("client_kwargs") or {}
    named = [settings.get("endpoint_url"), inner.get("endpoint_url")]
    named += [os.environ.get(name) for name in _ENDPOINTS.get(scheme, ())]
    named += [
        part.removeprefix("BlobEndpoint=")
        for part in os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";")
        if part.startswith("BlobEndpoint=") and scheme in {"az", "abfs", "abfss"}
    ]
    url = next((str(url) for url in named if url), "")
    return redact_uri(url) if url else f"the one that the driver for {scheme}:// finds by itself"


def check_endpoint(scheme: str, *, empty: bool = True) -> None:
    """Refuse variables whose endpoint is no URL, before anything is opened: some drivers do not survive them.

    Args:
        scheme: That of the store's URI, without the driver's name.
        empty: Whether the driver takes an empty variable for one that is not set.

    Raises:
        ConfigurationError: It names the variable.
    """
    for name in _ENDPOINTS.get(scheme, ()) if scheme in _S3 else ():
        value = os.environ.get(name)
        if value is None or (not value and empty) or _is_url(value):
            continue
        raise ConfigurationError(
            f"{name} must be a URL such as https://host or http://host:9000, not {redact_uri(value)!r}. Signs such as / ? # @ in "
            "a user or a password are written %2F, %3F, %23 and %40. Unset it to use the endpoint that belongs to the region."
        )


def _is_url(value: str) -> bool:
    if not _URL.fullmatch(value):
        return False
    try:
        parts = urlsplit(value)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port, or of an address in brackets
        return False


def without_secrets(text: str, uri: str) -> str:
    """A text of a driver as it may be shown: nothing secret of the URI, of an endpoint's URL or of the environment is in it."""
    return redact(text, *_secret_uris(uri))


def without_secrets_in(error: BaseException, uri: str) -> BaseException:
    """An error as it may be the cause of another: itself, if neither it nor what caused it says anything secret."""
    texts = [f"{one} {one!r}" for one in _chain(error)]
    if all(without_secrets(text, uri) == text for text in texts):
        return error
    return DriverError(f"{type(error).__name__}: {without_secrets(str(error), uri)}")


class DriverError(Exception):
    """Stands for an error of a driver whose text, or that of its cause, had secrets in it."""


def in_time(act: Callable[[], T], uri: str, seconds: float) -> T:
    """Do something that must not take for ever.

    Raises:
        StoreUnavailableError: It is still not done after so many seconds. It goes on in a thread that nobody waits for.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(act())
        except BaseException as error:  # noqa: BLE001 - for the thread that waits
            failed.append(error)

    thread = threading.Thread(target=run, name="diloco-open", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        raise StoreUnavailableError(
            f"{redact_uri(uri)} cannot be opened: the store did not answer within {seconds:g} s. Its endpoint is "
            f"{endpoint(uri)}: see that it is the right one, and that this machine can reach it."
        )
    return done[0]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            todo += [one.__cause__, one.__context__]


def _secret_uris(uri: str) -> list[str]:
    values = [os.environ[name] for name in _SECRETS if os.environ.get(name)]
    # A connection string is made of several values; whole, it would hardly ever be found.
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
