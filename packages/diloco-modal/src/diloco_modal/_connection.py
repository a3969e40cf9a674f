"""The connection to Modal: its client, made at the first call, and the environment in which all is looked for."""

from __future__ import annotations

import re
import threading
import urllib.parse
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from diloco_protocol import AuthError, BackendError, InvalidRequestError

from . import _many as many
from ._import import import_modal
from ._options import ModalOptions

T = TypeVar("T")
_SENT = (
    "token_id",
    "token_secret",
    "oauth_refresh_token",
    "oauth_client_id",
    "oauth_client_secret",
)
_URL = re.compile(r"https?://[^/?#]|unix:", re.IGNORECASE)


def check_settings() -> None:
    """Refuse settings of Modal's client of which it would say something else, or too much: an error of its own shows a token.

    Raises:
        AuthError: A token cannot be sent; names the setting, and not its value.
        InvalidRequestError: Another setting cannot be used.
    """
    for name in _SENT:
        value = _setting(name, AuthError) or ""
        if not (value.isascii() and value.isprintable()):
            raise AuthError(
                f"{_named(name)} has a character that no token has, such as a line end or one that "
                "cannot be seen: set it again"
            )
    url = _setting("server_url") or ""
    try:
        usable = _URL.match(url) and urllib.parse.urlsplit(url).port != 0
    except ValueError:
        usable = False
    if not usable:
        raise InvalidRequestError(f"{_named('server_url')} is no URL such as https://api.modal.com")


def _setting(name: str, error: type[BackendError] = InvalidRequestError) -> str | None:
    from modal.config import config

    try:
        value = config.get(name)
    except KeyError:  # that came with a later client
        return None
    if value is not None and not isinstance(value, str):
        raise error(f"{_named(name)} is of the type {type(value).__name__}, and must be text")
    return value


def _named(name: str) -> str:
    return f"MODAL_{name.upper()}, or {name} in the file of Modal's settings,"


class Connection:
    """Safe to share between threads.

    Attributes:
        known_environment: What :meth:`environment` has found; None before it was called, unless the
            options name one.
    """

    def __init__(self, options: ModalOptions) -> None:
        self._options = options
        self._client = options.client
        self.known_environment = options.environment_name
        self._lock = threading.Lock()

    def client(self) -> Any:
        """Modal's client.

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
        """Name of the environment in which everything is looked for; asked for once, since a profile may change.

        Raises:
            BackendError: Modal could not be asked for the default one.
        """
        if self.known_environment is None:
            client, modal = self.client(), import_modal()

            async def find() -> str:
                return (
                    await modal.Environment.from_context(client=client).hydrate.aio()
                ).name or ""

            # Modal's client would read the profile again for each object, and the workspace has a
            # default.
            self.known_environment = _setting("environment") or self._ask(
                find, "looking for the default environment"
            )
        return self.known_environment

    def _ask(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        return many.ask(call, self._options.request_timeout, what)

    @property
    def _where(self) -> dict[str, Any]:
        return {"client": self.client(), "environment_name": self.environment()}
