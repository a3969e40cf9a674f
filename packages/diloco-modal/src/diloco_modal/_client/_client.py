"""The calls of Modal's client that a backend needs, with deadlines and the protocol's errors."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import Recent

from .._request._options import ModalOptions
from .._request._payload import deploy_command
from .._state._handles import link
from .._state._record import damaged
from .._state._states import End
from ._errors import DenseLogError, MissingError
from ._import import import_modal
from ._secrets import Secrets

_LOG_ENTRY_BYTES = 200
"""Bytes that an entry of a log takes besides its text."""


_KEPT_CALLS = 4096


class Client(Secrets):
    """The calls to Modal; its client is made at the first one. Safe to share between threads."""

    def __init__(self, options: ModalOptions) -> None:
        super().__init__(options)
        self._own: Recent[str, bool] = Recent(_KEPT_CALLS)
        self._apps: dict[tuple[str, str], str] = {}

    def function(self, bound: Mapping[str, Any], secrets: Mapping[str, str]) -> Any:
        """Return the deployed function, with the options of a launch.

        Args:
            bound: Arguments of ``with_options``.
            secrets: Names of Secrets by the variable that each must hold.

        Raises:
            InvalidRequestError: The app is not deployed, or a Secret or its key is missing; says
                what to do.
        """
        modal = import_modal()
        options, where = self._options, self._where
        name = f"the function {options.function!r} of the app {options.app!r}"
        function = modal.Function.from_name(options.app, options.function, **where)
        try:
            self._ask(function.hydrate.aio, f"looking for {name}")
        except MissingError as error:
            why = f"It is not deployed: {deploy_command(options)}"
            raise InvalidRequestError(f"{str(error).rstrip('.')}. {why}") from error
        chosen = dict(bound)
        if secrets:
            chosen["secrets"] = self._secrets_of(function, secrets)
        return self._ask(
            lambda: function.with_options(**chosen).hydrate.aio(), f"choosing options of {name}"
        )

    async def spawn(self, function: Any, payload: Mapping[str, Any]) -> str:
        """Start a call, and return its id."""
        call = await self._asked(function.spawn.aio(payload), f"starting rank {payload['rank']}")
        self._own.keep(str(call.object_id), True)
        return str(call.object_id)

    async def check_app(self, call_id: str, app: str, function: str) -> None:
        """Refuse a call that does not belong to an app: any program may write calls into a record.

        Args:
            call_id: The call; for one that was started here, Modal is not asked.
            app: Name of the app that the call must belong to.
            function: Name of a function of that app.

        Raises:
            DamagedRecordError: It belongs to another app.
            MissingError: There is no such app, so this cannot be checked.
        """
        if call_id in self._own:
            return
        client, place = self.client(), (app, function)
        try:
            theirs = self._wire.get_app.aio(client, call_id)
            app_id = await self._asked(theirs, f"looking for the app of the call {call_id}")
        except MissingError:  # the call is gone
            return
        if app_id != self._apps.get(place):  # the app may have been stopped and deployed anew
            find = self._wire.find_app.aio(client, app, function, self.environment())
            self._apps[place] = await self._asked(find, f"looking for the app {app!r}")
        if app_id != self._apps[place]:
            raise damaged(
                f"the run's record on Modal names the call {call_id}, which is none of the app "
                f"{app!r} ({link(call_id)})"
            )

    async def end(self, call_id: str, *, value: bool = True) -> End | None:
        """Return how a call has ended, and its text if ``value``; None if it has not ended.

        Raises:
            MissingError: Its result has expired, or there is no such call.
            BackendError: Modal could not be asked.
        """
        end: Awaitable[End | None] = self._wire.get_end.aio(self.client(), call_id, value=value)
        return await self._asked(end, f"looking at the call {call_id}")

    def call(self, call_id: str) -> Any:
        """Return a call of Modal's client by its id."""
        modal = import_modal()
        return modal.FunctionCall.from_id(call_id, client=self.client())

    def status(self, call_id: str) -> str:
        """Return Modal's word for the state of a call, such as ``"TERMINATED"``.

        ``"PENDING"`` is the word for a call that waits, and also for one that runs.
        """
        client = self.client()
        look = lambda: self._wire.get_status.aio(client, call_id)  # noqa: E731
        return str(self._ask(look, f"looking at the call {call_id}"))

    def cancel(self, call_id: str) -> None:
        """End a call and its container.

        Raises:
            MissingError: Modal does not know it.
        """
        end = lambda: self.call(call_id).cancel.aio(terminate_containers=True)  # noqa: E731
        self._ask(end, f"cancelling the call {call_id}")

    def log_entries(
        self, call_id: str, call: Any, fetch: Callable[[Any], Any], most: int
    ) -> list[Any]:
        """Return what ``fetch`` reads of the logs of a call.

        Args:
            call_id: The call.
            call: The same call, as :meth:`call` returns it.
            fetch: Takes the logs, and returns an asynchronous generator of Modal's client.
            most: Bytes to read at most.

        Raises:
            DenseLogError: There are more bytes; the rest is not read.
        """

        async def read() -> list[Any]:
            entries: list[Any] = []
            size = 0
            async with contextlib.aclosing(fetch(logs)) as stream:
                async for entry in stream:
                    size += len(entry.message.encode()) + _LOG_ENTRY_BYTES
                    if size > most:
                        entries.clear()  # otherwise the error would keep them in memory
                        raise DenseLogError(f"there are more than {most} bytes at once")
                    entries.append(entry)
            return entries

        logs = SimpleNamespace(fetch=call.logs.fetch.aio, tail=call.logs.tail.aio)
        what = f"reading the log of {call_id}, which Modal shows at {link(call_id)}"
        return self._ask(read, what)
