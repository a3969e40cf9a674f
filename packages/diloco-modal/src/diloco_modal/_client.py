"""The calls of Modal's client that a backend needs, each with a deadline of ours and the protocol's errors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from diloco_protocol import InvalidRequestError

from . import _many as many
from ._errors import MissingError, asked, import_modal, translated
from ._handles import link, status_in
from ._options import ModalOptions
from ._payload import deploy_command, record_name
from ._record import checked
from ._secrets import secrets_of

T = TypeVar("T")

PREFIX = "diloco-"
_KEPT_SECONDS = 60.0
_KEPT_RECORDS = 64
_KEPT_CALLS = 4096


class Client:
    """Safe to share between threads. Modal's client is made at the first call.

    Attributes:
        known_environment: What :meth:`environment` has found; None before it was called, unless the options name one.
    """

    def __init__(self, options: ModalOptions) -> None:
        self._options = options
        self._client = options.client
        self.known_environment = options.environment_name
        self._lock = threading.Lock()
        self._records: dict[str, tuple[float, Any]] = {}
        self._entries: dict[str, tuple[float, Mapping[str, Any]]] = {}
        self._calls: dict[str, Any] = {}

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

    # --- functions and calls ---

    def function(self, bound: Mapping[str, Any], secrets: Mapping[str, str]) -> Any:
        """The deployed function, with the options of a launch.

        Args:
            bound: Arguments of ``with_options``.
            secrets: Names of Secrets by the variable that each must hold.

        Raises:
            InvalidRequestError: The app is not deployed, or a Secret or its key is missing; says what to do.
        """
        import modal

        options, where = self._options, self._where
        name = f"the function {options.function!r} of the app {options.app!r}"
        function = modal.Function.from_name(options.app, options.function, **where)
        try:
            self._ask(function.hydrate, f"looking for {name}")
        except MissingError as error:
            text, environment = str(error).rstrip("."), where["environment_name"]
            if f"Environment {environment!r} not found" in text:
                why = f"modal environment list shows those that are there, and modal environment create {environment} makes one"
            else:
                why = f"It is not deployed: {deploy_command(options)}"
            raise InvalidRequestError(f"{text}. {why}") from error
        held = []
        if secrets:
            declared = self._options.app_secrets or ()
            held = secrets_of(function, secrets, declared, where, self._ask)
        chosen = {**bound, **({"secrets": held} if held else {})}
        return self._ask(
            lambda: function.with_options(**chosen).hydrate(), f"choosing options of {name}"
        )

    async def spawn(self, function: Any, payload: Mapping[str, Any]) -> str:
        """Start a call; its id."""
        call = await many.asked(
            function.spawn.aio(payload),
            self._options.request_timeout,
            f"starting rank {payload['rank']}",
        )
        self._keep_call(str(call.object_id), call)
        return str(call.object_id)

    async def answer(self, call_id: str) -> Any:
        """What a call returned.

        Raises:
            TimeoutError: It has not ended.
            MissingError: Its result has expired, or there is no such call.
            BackendError: Modal could not be asked.
            BaseException: What the call ended with.
        """
        call = self._call(call_id)
        what = f"looking at the call {call_id}"
        try:
            return await many.bounded(call.get.aio(timeout=0), self._options.request_timeout, what)
        except Exception as error:
            known = translated(error, what)
            if known is None or known is error:
                raise
            raise known from error

    def _call(self, call_id: str) -> Any:
        import modal

        with self._lock:
            kept = self._calls.get(call_id)
        if kept is None:
            kept = modal.FunctionCall.from_id(call_id, client=self.client())
            self._keep_call(call_id, kept)
        return kept

    def _keep_call(self, call_id: str, call: Any) -> None:
        """The first question to a call is slower than all others, unless the call was started here."""
        with self._lock:
            if len(self._calls) >= _KEPT_CALLS:
                self._calls.clear()
            self._calls[call_id] = call

    def status(self, call_id: str) -> str:
        """Modal's word for the state of a call, such as ``"PENDING"``, also while it runs, or ``"TERMINATED"``."""
        call = self._call(call_id)
        graph = self._ask(call.get_call_graph, f"looking at the call {call_id}")
        return status_in(graph, call_id)

    def cancel(self, call_id: str) -> None:
        """End a call and its container; one that is gone is ignored."""
        call = self._call(call_id)
        try:
            self._ask(
                lambda: call.cancel(terminate_containers=True), f"cancelling the call {call_id}"
            )
        except MissingError:
            return

    def log_entries(self, call_id: str, fetch: Callable[[Any], Any]) -> list[Any]:
        """What ``fetch`` reads of a call's logs."""
        call = self._call(call_id)
        what = f"reading the log of {call_id}, which Modal shows at {link(call_id)}"
        return self._ask(lambda: list(fetch(call.logs)), what)

    # --- records ---

    def record(self, run_id: str, *, create: bool = False) -> Any:
        """The Dict of a run, found by its name.

        Raises:
            MissingError: There is none.
        """
        import modal

        name = record_name(run_id)
        where, now = self._where, self._options.clock()

        def find() -> Any:
            return modal.Dict.from_name(name, create_if_missing=create, **where).hydrate()

        found = self._ask(find, f"looking for the Dict {name!r}")
        with self._lock:
            if len(self._records) >= _KEPT_RECORDS:
                self._records.clear()
            self._records[run_id] = now, found
        return found

    def read(self, run_id: str) -> tuple[Any, Mapping[str, Any]]:
        """The Dict of a run, and its entries.

        For a minute it is asked for by its id; only if it is not there, or is not a run's any more, is its name looked up. A
        Dict of the same name that was made meanwhile has another id.

        Raises:
            MissingError: There is no such Dict.
        """
        with self._lock:
            since, kept = self._records.get(run_id, (0.0, None))
        # A clock may also be set back.
        if kept is not None and 0 <= self._options.clock() - since < _KEPT_SECONDS:
            with contextlib.suppress(MissingError):
                entries = self.entries(kept)
                if "launch" in entries:
                    return kept, entries
        record = self.record(run_id)
        return record, self.entries(record)

    def put_once(self, record: Any, key: str, value: Any) -> bool:
        """Create an entry; whether it was this call that did."""
        return self._ask(
            lambda: bool(record.put(key, value, skip_if_exists=True)),
            f"writing {key} to the record",
        )

    async def hold(self, record: Any, key: str, value: Any) -> Any:
        """Create an entry if there is none; what is there then.

        Raises:
            DamagedRecordError: It is not what this version writes.
        """
        seconds = self._options.request_timeout
        put = record.put.aio(key, value, skip_if_exists=True)
        if await many.asked(put, seconds, f"writing {key} to the record"):
            return value
        held = await many.asked(record.get.aio(key), seconds, f"reading {key} from the record")
        return checked(key, held)

    def get(self, record: Any, key: str) -> Any:
        """An entry; None if there is none."""
        return self._ask(lambda: record.get(key), f"reading {key} from the record")

    def pop_own(self, record: Any, key: str, value: Mapping[str, Any]) -> None:
        """Remove an entry that was made here, which its id tells: a try whose answer was lost may have made it."""
        held = self.get(record, key)
        if isinstance(held, Mapping) and held.get("id") == value["id"]:
            self._ask(lambda: record.pop(key, None), f"removing {key} from the record")

    def entries(self, record: Any) -> Mapping[str, Any]:
        """All entries. They are read only if their number is not that of the last time, or after a minute.

        Entries are created and never changed, and Modal's client takes as long to read a few of them as to ask for a result.
        Only a cancel that has failed takes its entry away, and another may come in its place: hence the minute.
        """
        key, now = record.object_id, self._options.clock()
        count = self._ask(record.len, "looking at the record")
        if count == 0:
            return {}
        with self._lock:
            kept = self._entries.get(key)
        if kept is not None and len(kept[1]) == count and 0 <= now - kept[0] < _KEPT_SECONDS:
            return kept[1]
        read: dict[str, Any] = self._ask(lambda: dict(record.items()), "reading the record")
        self.keep_entries(record, read, now)
        return read

    def keep_entries(self, record: Any, entries: Mapping[str, Any], now: float) -> None:
        """Have :meth:`entries` give these, as long as the record has as many.

        Args:
            record: Of a run.
            entries: All that it has, as far as is known here.
            now: When the first of them was read or written.
        """
        with self._lock:
            if len(self._entries) >= _KEPT_RECORDS:
                self._entries.clear()
            self._entries[record.object_id] = now, entries

    def delete_record(self, run_id: str, record: Any) -> None:
        """Remove the Dict of a run, if it is there; one that was made meanwhile under its name is another run's, and stays."""
        import modal

        name, where = record_name(run_id), self._where
        with self._lock:
            self._records.pop(run_id, None)

        def delete() -> None:
            # Modal's client removes by name only.
            if modal.Dict.from_name(name, **where).hydrate().object_id == record.object_id:
                modal.Dict.objects.delete(name, allow_missing=True, **where)

        with contextlib.suppress(MissingError):
            self._ask(delete, f"removing the Dict {name!r}")

    async def is_record(self, run_id: str) -> bool:
        """Whether there is a Dict of that name, and it is a run's."""
        import modal

        name = record_name(run_id)
        record = modal.Dict.from_name(name, **self._where)
        what = f"looking at the Dict {name!r}"
        try:
            return bool(
                await many.asked(record.contains.aio("launch"), self._options.request_timeout, what)
            )
        except MissingError:  # removed meanwhile
            return False

    def record_names(self) -> list[str]:
        """Names of all Dicts that can be a run's, oldest first."""
        import modal

        where = self._where
        held = self._ask(lambda: modal.Dict.objects.list(**where), "listing Dicts")
        return [each.name for each in reversed(held) if (each.name or "").startswith(PREFIX)]
