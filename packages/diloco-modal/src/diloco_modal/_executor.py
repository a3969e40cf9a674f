"""The executor: the verbs of the protocol, carried out with calls of Modal."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from diloco_protocol import (
    Backoff,
    BaseExecutor,
    Capabilities,
    Finding,
    InvalidRequestError,
    LogQuery,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaStatus,
    ResultLostError,
    RunRequest,
    UnavailableError,
)
from diloco_protocol.backend import check_ended, takes

from ._client._client import Client
from ._request._options import DAY, ModalOptions
from ._request._payload import (
    LONGEST_CALL,
    MARGIN,
    MAX_RESULT_BYTES,
    PAYLOAD_VERSION,
    call_timeout,
    payloads,
)
from ._request._resources import bound_options
from ._state import _states as states
from ._state._handles import check_handle, is_of, link, make_handle, not_its_own
from ._state._record import (
    DamagedRecordError,
    calls_of,
    launch_of,
    readable_calls,
)
from ._verbs._cancel import Canceller
from ._verbs._check import check_launch
from ._verbs._launch import Launcher
from ._verbs._logs import read_log
from ._verbs._observe import Observer

_WARNINGS = 10


class ModalSpawnExecutor(BaseExecutor):
    """Executor that runs replicas as calls of a function of an app on Modal: one call per rank.

    The app must be deployed. What Modal does not keep about calls is in one ``modal.Dict`` per run,
    ``diloco-<run_id>``, so any executor in any process can answer for any handle. The Dict fades 7
    days after its last use, as results do. Safe to share between threads.

    ``gpu``: ``"H100"``, ``"H100:8"`` or ``"any:2"``. ``secrets`` maps a variable to the name of the
    Secret of Modal that has it as a key. Cancelling ends a single replica. The arguments are the
    fields of :class:`ModalOptions`.

    Raises:
        InvalidRequestError: A value is not allowed; says what was given and what is allowed.
    """

    backend_name = "modal"
    supports_inter_replica_network = False
    capabilities = Capabilities(
        cancel_scope="replica",
        result_channel="the call's return value",
        max_result_bytes=MAX_RESULT_BYTES,
        log_streams=("stdout", "stderr", "combined"),
        preemptible=True,
        retention=7.0 * DAY,
        counts_attempts=True,
        calls_per_look="rank",
    )

    options_class = ModalOptions
    replica_word = "call"

    @takes(ModalOptions)
    def __init__(self, *arguments: Any, **options: Any) -> None:
        chosen = ModalOptions(*arguments, **options)
        super().__init__(**chosen.of_base(Backoff(first=1.0, factor=1.5, cap=20.0)))
        self._options = chosen
        # The limit of a single attempt; how many restarts there may be is up to each launch.
        longest = LONGEST_CALL - MARGIN - chosen.grace
        self.capabilities = replace(type(self).capabilities, max_timeout=longest)
        self._client = Client(chosen)
        self._launcher = Launcher(self._client, chosen, self._backoff, self._patiently)
        self._observer = Observer(self._client, chosen)
        self._canceller = Canceller(self._client, chosen, self._observer, self._patiently)

    # --- launching ---

    def _check_request(self, request: RunRequest) -> None:
        if request.spot is False:
            raise InvalidRequestError(
                "spot=False: Modal may take any container away; leave spot out"
            )
        seconds = call_timeout(request, self._options.grace)
        if seconds > LONGEST_CALL:
            raise InvalidRequestError(
                f"timeout={request.timeout!r} with max_restarts={request.max_restarts} needs a "
                f"call of {seconds:.0f} s, and Modal allows {LONGEST_CALL:.0f}: give less, and "
                "launch again on the same rendezvous to go on"
            )
        bound_options(request, self._options)

    def _plan(self, request: RunRequest) -> list[dict[str, Any]]:
        bound = bound_options(request, self._options)
        specs = request.specs(grace=self._options.grace)
        place = {"app": self._options.app, "function": self._options.function, "options": bound}
        return [
            # The spec as JSON values, which can be redacted.
            {**place, "payload": {**payload, "spec": spec.to_dict()}}
            for payload, spec in zip(payloads(request, self._options), specs, strict=True)
        ]

    def _findings(self, request: RunRequest) -> list[Finding]:
        return check_launch(self._client, self._options, request, self._patiently)

    def _seen_by_probe(self) -> list[Finding]:
        text = f"the app reads payloads of version {PAYLOAD_VERSION}"
        return [Finding("version", True, text)]

    def _where(self) -> str:
        place = self._options.environment_name, self._options.app
        return "/".join(filter(None, place))

    def _submit(self, request: RunRequest) -> list[ReplicaHandle]:
        payloads(request, self._options)  # refuses one that is too large before the first call
        return self._launcher.launch(request)

    # --- watching ---

    def _observe_run(
        self, handles: Sequence[ReplicaHandle]
    ) -> Mapping[ReplicaHandle, ReplicaStatus]:
        return self._observer.observe(handles)

    def _result(self, handle: ReplicaHandle) -> Any:
        ended = self._observer.ended(handle)
        if ended is None or (isinstance(ended[1], states.Lost) and ended[1].late):
            self._observer.forget([handle])
            self._observe_run([handle])
            ended = self._observer.ended(handle)
        if ended is None:
            raise ResultLostError(
                f"rank {handle.rank} of run {handle.run_id!r} succeeded, and Modal has kept its "
                f"result for 7 days only: {link(handle.metadata['function_call_id'])}"
            )
        _, result = ended
        if isinstance(result, states.Lost):
            kind = UnavailableError if result.late else ResultLostError
            raise kind(f"rank {handle.rank} of run {handle.run_id!r}: {result.why}")
        return copy.deepcopy(result)  # callers may change it

    def _launch_of(self, handle: ReplicaHandle) -> Mapping[str, Any]:
        """Return the entry of a handle's launch; ReplicaNotFoundError if there is none any more."""
        _, entries = self._observer.read_for(handle)
        launch = launch_of(entries)
        if not is_of(handle, launch, entries):
            raise ReplicaNotFoundError(
                f"there is no record of rank {handle.rank} of run {handle.run_id!r}"
            )
        return launch

    def _rendezvous(self, handle: ReplicaHandle) -> str | None:
        uri: str | None = self._launch_of(handle).get("rendezvous")
        return uri

    def _logs(self, handle: ReplicaHandle, query: LogQuery) -> Iterator[str]:
        launch = self._launch_of(handle)
        call_id = handle.metadata["function_call_id"]
        call = self._client.call(call_id)

        def fetch(ask: Callable[[Any], Any], most: int) -> list[Any]:
            return self._patiently(lambda: self._client.log_entries(call_id, call, ask, most))

        ended = lambda: self._patiently(lambda: self._has_ended(handle))  # noqa: E731
        clock = self._options.clock
        return read_log(fetch, query, ended, clock, self._backoff, launch["at"])

    # --- ending and finding ---

    def _stop(self, handle: ReplicaHandle) -> None:
        self._canceller.cancel(handle)

    def cancel_run(self, run_id: str) -> None:
        """End all replicas of a run; see :meth:`BaseExecutor.cancel_run`.

        Ranks without a call are not started any more. If no rank has a call, the record is removed,
        and the name is free again.
        """
        self._canceller.cancel_run(run_id, self.attach, self.cancel)

    def _purge(self, handle: ReplicaHandle) -> None:
        while True:
            try:
                record, entries = self._observer.read_for(handle)
            except ReplicaNotFoundError as error:
                self._observer.check_over(handle, str(error))
                return
            try:
                launch = launch_of(entries)
                if not is_of(handle, launch, entries):
                    if calls_of(entries).get(handle.rank) == handle.metadata["function_call_id"]:
                        raise InvalidRequestError(f"{not_its_own(handle)}; nothing is removed")
                    self._observer.check_over(handle, not_its_own(handle))
                    return
                run_id = str(handle.run_id)  # read() refuses None
                handles = _handles_of(run_id, launch, calls_of(entries))
            except DamagedRecordError as error:
                # Without the record, nothing could find such a call.
                raise DamagedRecordError(
                    f"run {handle.run_id!r} is not purged, since a call that its record does not "
                    f"name may be running: {error}"
                ) from error
            looks = self._observe_run(handles).items()
            alive = [replica.rank for replica, status in looks if not status.state.terminal]
            check_ended(run_id, alive)
            # A call that claims a rank before the record is gone would train, and nothing could
            # find it any more.
            if not self._canceller.void(record, entries):
                break
        self._client.delete_record(handle.run_id, record)
        self._observer.forget(handles)

    def _list_runs(self) -> list[str]:
        return self._observer.runs()

    def _attach(self, run_id: str) -> list[ReplicaHandle]:
        _, entries = self._observer.read(run_id)
        launch, (calls, damage) = launch_of(entries), readable_calls(entries)
        handles = _handles_of(run_id, launch, calls)
        if damage and not handles:
            raise damage[0]
        for error in damage[:_WARNINGS]:
            logging.getLogger("diloco_modal").warning("a rank has no handle: %s", error)
        if not handles:
            raise ReplicaNotFoundError(
                f"there is a record of the run {run_id!r}, and no replica was started yet: its "
                "launch is under way or was interrupted. Launch it again, or free its name: "
                f"cancel_run({run_id!r})"
            )
        return handles

    def _check_handle(self, handle: ReplicaHandle) -> None:
        check_handle(handle, self._client.known_environment)  # a journal may answer without Modal


def _handles_of(
    run_id: str, launch: Mapping[str, Any], calls: Mapping[int, str | None]
) -> list[ReplicaHandle]:
    return [make_handle(launch, rank, call, run_id) for rank, call in calls.items() if call]
