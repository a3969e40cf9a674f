"""The connection to Modal: its client, made at the first call, and the environment to look in."""

from __future__ import annotations

import re
import threading
import urllib.parse
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from diloco_protocol import AuthError, BackendError, InvalidRequestError

from .._request._options import ModalOptions
from . import _event_loop as loop
from ._import import import_modal

T = TypeVar("T")
_SENT = (
    "token_id",
    "token_secret",
    "oauth_refresh_token",
    "oauth_client_id",
    "oauth_client_secret",
)
_READ_LATER = ("max_throttle_wait", "payload_format")
_URL = re.compile(r"https?://[^/?#]|unix:", re.IGNORECASE)


def check_settings() -> None:
    """Refuse settings about which Modal's client would raise a wrong error, or say too much.

    An error of the client itself would show a token.

    Raises:
        AuthError: A token cannot be sent; the error names the setting, but not its value.
        InvalidRequestError: Another setting cannot be used.
    """
    for name in _SENT:
        value = _setting(name, AuthError) or ""
        if not (value.isascii() and value.isprintable()):
            raise AuthError(
                f"{_named(name)} has a character that no token has, such as a line end or one that "
                "cannot be seen: set it again"
            )
    # Several addresses stand with commas between them; the client takes the first that answers.
    if not all(_is_url(url.strip(" ")) for url in (_setting("server_url") or "").split(",")):
        raise InvalidRequestError(f"{_named('server_url')} is no URL such as https://api.modal.com")
    for name in _READ_LATER:
        _read(name)


def _is_url(text: str) -> bool:
    try:
        return bool(
            text.isprintable() and _URL.match(text) and urllib.parse.urlsplit(text).port != 0
        )
    except ValueError:
        return False


def _read(name: str) -> object:
    from modal.config import config
    from modal.exception import InvalidError

    try:
        return config.get(name)
    except KeyError:  # only a later version of the client has this setting
        return None
    except InvalidError as wrong:
        raise InvalidRequestError(f"{_named(name)} cannot be used: {wrong}") from wrong


def _setting(name: str, error: type[BackendError] = InvalidRequestError) -> str | None:
    value = _read(name)
    if value is not None and not isinstance(value, str):
        raise error(f"{_named(name)} is of the type {type(value).__name__}, and must be text")
    return value


def _named(name: str) -> str:
    return f"MODAL_{name.upper()}, or {name} in the file of Modal's settings,"


class Connection:
    """A connection to Modal. Safe to share between threads.

    Attributes:
        known_environment: The environment that :meth:`environment` has found; None before it was
            called, unless the options name one.
    """

    def __init__(self, options: ModalOptions) -> None:
        self._options = options
        self._client = options.client
        self.known_environment = options.environment_name
        self._lock = threading.Lock()

    def client(self) -> Any:
        """Return Modal's client.

        Raises:
            AuthError: There is no token, or it cannot be sent.
            InvalidRequestError: Modal's client cannot use its settings.
            MissingDependencyError: The package ``modal`` is not installed.
        """
        modal = import_modal()
        with self._lock:
            if self._client is None:
                check_settings()
                self._client = self._ask(modal.Client.from_env.aio, "connecting to Modal")
            return self._client

    def environment(self) -> str:
        """Return the name of the environment in which to look for everything.

        It is found out once and then kept, since a profile may change.

        Raises:
            BackendError: Modal could not be asked for the default environment.
        """
        if self.known_environment is None:
            client, modal = self.client(), import_modal()

            async def find() -> str:
                return (
                    await modal.Environment.from_context(client=client).hydrate.aio()
                ).name or ""

            # Otherwise Modal's client would read the profile again for each object. If no setting
            # names an environment, the workspace's default applies.
            self.known_environment = _setting("environment") or self._ask(
                find, "looking for the default environment"
            )
        return self.known_environment

    def _ask(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        return loop.ask(call, self._options.request_timeout, what)

    async def _asked(self, call: Awaitable[T], what: str) -> T:
        return await loop.asked(call, self._options.request_timeout, what)

    @property
    def _wire(self) -> Any:
        """Return the module that uses the parts of Modal's client that may have moved."""
        import_modal()
        from . import _wire

        return _wire

    @property
    def _where(self) -> dict[str, Any]:
        return {"client": self.client(), "environment_name": self.environment()}
