"""The connection to Modal: its client, made at the first call, and the environment to look in."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from .._request._options import ModalOptions
from . import _event_loop as loop
from ._import import import_modal

T = TypeVar("T")


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
                self._client = self._ask(
                    modal.Client.from_env.aio,
                    "connecting to Modal, as MODAL_SERVER_URL or the profile says",
                )
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
            from modal.config import config

            self.known_environment = config.get("environment") or self._ask(
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
