"""The connection to Modal: its client, made at the first call, and the environment in which all is looked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ._errors import asked, import_modal
from ._options import ModalOptions

T = TypeVar("T")


class Connection:
    """Safe to share between threads.

    Attributes:
        known_environment: What :meth:`environment` has found; None before it was called, unless the options name one.
    """

    def __init__(self, options: ModalOptions) -> None:
        self._options = options
        self._client = options.client
        self.known_environment = options.environment_name
        self._lock = threading.Lock()

    def client(self) -> Any:
        """Modal's client.

        Raises:
            AuthError: There is no token.
            MissingDependencyError: The package ``modal`` is not installed.
        """
        import_modal()
        import modal

        with self._lock:
            if self._client is None:
                self._client = self._ask(modal.Client.from_env, "connecting to Modal")
            return self._client

    def environment(self) -> str:
        """Name of the environment in which everything is looked for; asked for once, since a profile may change.

        Raises:
            BackendError: Modal could not be asked for the default one.
        """
        if self.known_environment is None:
            client = self.client()
            import modal
            from modal.config import config

            # Modal's client would read the profile again for each object, and the workspace has a default.
            self.known_environment = config.get("environment") or self._ask(
                lambda: modal.Environment.from_context(client=client).hydrate().name or "",
                "looking for the default environment",
            )
        return self.known_environment

    def _ask(self, call: Callable[[], T], what: str) -> T:
        return asked(call, self._options.request_timeout, what)

    @property
    def _where(self) -> dict[str, Any]:
        return {"client": self.client(), "environment_name": self.environment()}
