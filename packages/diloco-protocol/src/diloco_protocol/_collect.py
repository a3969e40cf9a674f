"""The wait loop for replicas, which all backends share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ._backoff import Backoff
from ._errors import (
    BackendError,
    InvalidRequestError,
    ReplicaNotFoundError,
    ResultLostError,
    ThrottledError,
)
from ._redact import redact_and_cut
from ._texts import readable
from ._types import Reason, ReplicaResult, ReplicaState, ReplicaStatus

if TYPE_CHECKING:
    from ._handle import ReplicaHandle

_SHOWN = 300  # characters of an error in a warning
_VICTIM = "ReplicaLostError"  # with which a replica ends because of another one

RESULT_LOST = "the result is lost: "
"""Beginning of the error text of a success whose result is gone."""

Progress = Callable[[Mapping["ReplicaHandle", ReplicaStatus]], None]


def collect(
    handles: Sequence[ReplicaHandle],
    observe_run: Callable[[Sequence[ReplicaHandle]], Mapping[ReplicaHandle, ReplicaStatus]],
    result_of: Callable[[ReplicaHandle], Any],
    *,
    place_of: Callable[[ReplicaHandle], Hashable] = lambda _: (),
    ends: Mapping[ReplicaHandle, ReplicaStatus] | None = None,
    timeout: float | None,
    backoff: Backoff,
    progress: Progress | None = None,
    warned: dict[ReplicaHandle, int] | None = None,
) -> list[ReplicaResult]:
    """Wait until all replicas are terminal or the time is up.

    Never ends anything, and may be repeated. Every tick makes one request per run, however many
    ranks it has. Retryable errors are absorbed until the deadline.

    Args:
        handles: Handles in any order, of any runs; duplicates are allowed.
        observe_run: Returns the statuses of some replicas of one run; a handle without a record is
            left out. May raise ReplicaNotFoundError if there is no record of the whole run.
        result_of: Returns the result of a replica that has succeeded; raises ResultLostError or
            ReplicaNotFoundError if it is gone.
        place_of: Returns what tells a handle's run apart from others of the same name.
        ends: Ends that are known already; they take precedence over everything that is observed.
        timeout: Seconds for all of them together; None for no limit.
        backoff: Delays between ticks, with clock and sleep.
        progress: Called after every tick with the statuses known so far.
        warned: How often a failed replica was seen while others went on; at the second time there
            is a warning. It is brought up to date. None: no replica goes on after the failure of
            another, so there is nothing to warn of.

    Returns:
        One result per handle, in the given order. A replica without a record is failed with reason
        LOST; one that had not ended by the deadline has its last known state. A success whose
        result is gone has the result None and an error that says so.

    Raises:
        InvalidRequestError: The first look found that a handle leads nowhere.
        BackendError: A run cannot be queried, or the result of a success cannot be read (a
            non-retryable error). It is raised when there is nothing else to wait for; until then,
            such a run is logged, and queried again at every tick. Or a retryable error still
            persisted at the deadline while a state or the result of a success was not known.
    """
    deadline = None if timeout is None else backoff.clock() + timeout
    runs = by_run(handles, place_of)
    wait = _Wait(observe_run, result_of, dict(ends or {}))
    refused: dict[ReplicaHandle, BackendError] = {}
    waited = False
    delays = backoff.delays()
    while True:
        error: BackendError | None = None
        before, refused = refused, {}
        changed = False
        for ranks in runs:
            waiting = [handle for handle in ranks if not wait.settled(handle)]
            if not waiting:
                continue
            try:
                changed |= wait.look(waiting)
                if warned is not None:
                    _warn_of_failure(ranks, wait.known, warned)
            except BackendError as caught:
                if caught.retryable:
                    error = caught
                elif isinstance(caught, InvalidRequestError) and not waited:
                    raise  # a handle is wrong, so do not wait
                else:
                    unknown = [replica for replica in waiting if not wait.ended(replica)] or waiting
                    refused |= dict.fromkeys(unknown, caught)
                    if unknown[0] not in before:
                        log(f"run {waiting[0].run_id!r} cannot be asked for: {caught}")
            error = wait.read_results(waiting) or error
        if progress is not None:
            progress(dict(wait.known))
        if all(handle in refused or wait.settled(handle) for ranks in runs for handle in ranks):
            break
        if changed:
            delays = backoff.delays()
        delay = next(delays)
        if isinstance(error, ThrottledError) and error.retry_after is not None:
            delay = max(delay, error.retry_after)
        if deadline is not None:
            left = deadline - backoff.clock()
            if left <= 0:
                if error is not None and not all(map(wait.answered, handles)):
                    raise error
                break
            delay = min(delay, left)
        backoff.sleep(delay)
        waited = True
    if unreadable := refused | wait.unreadable:
        handle, refusal = next(iter(unreadable.items()))
        what = "succeeded, but its result cannot be read"
        refusal.add_note(
            f"rank {handle.rank} of run {handle.run_id!r} "
            f"{what if wait.succeeded(handle) else 'cannot be asked for'}: {len(unreadable)} of "
            f"{len(handles)} handles are affected; collect the others without them"
        )
        raise refusal
    return [
        to_result(handle, wait.known[handle], wait.results.get(handle), wait.lost.get(handle))
        for handle in handles
    ]


@dataclass(slots=True)
class _Wait:
    """What is known of replicas that are waited for."""

    observe_run: Callable[[Sequence[ReplicaHandle]], Mapping[ReplicaHandle, ReplicaStatus]]
    result_of: Callable[[ReplicaHandle], Any]
    known: dict[ReplicaHandle, ReplicaStatus]
    results: dict[ReplicaHandle, Any] = field(default_factory=dict)
    lost: dict[ReplicaHandle, str] = field(default_factory=dict)
    unreadable: dict[ReplicaHandle, BackendError] = field(default_factory=dict)

    def ended(self, handle: ReplicaHandle) -> bool:
        return handle in self.known and self.known[handle].state.terminal

    def succeeded(self, handle: ReplicaHandle) -> bool:
        return handle in self.known and self.known[handle].state is ReplicaState.SUCCEEDED

    def answered(self, handle: ReplicaHandle) -> bool:
        """Return whether it is known how a replica ended.

        A success whose result could not be read must not look like one that returned None.
        """
        return handle in self.known and (not self.succeeded(handle) or handle in self.results)

    def settled(self, handle: ReplicaHandle) -> bool:
        return handle in self.unreadable or (self.ended(handle) and self.answered(handle))

    def look(self, waiting: Sequence[ReplicaHandle]) -> bool:
        """Look at one run once, and return whether anything changed."""
        try:
            seen = self.observe_run(waiting)
        except ReplicaNotFoundError:
            seen = {}
        changed = False
        for handle in waiting:
            status = seen.get(handle)
            if status is None and self.ended(handle):
                continue  # its record was removed after its end was seen
            if status is None:
                text = f"there is no record of rank {handle.rank} of run {handle.run_id!r}: its end"
                status = ReplicaStatus(
                    ReplicaState.FAILED, reason=Reason.LOST, message=f"{text} is unknown"
                )
            changed |= self.known.get(handle) != status
            self.known[handle] = status
        return changed

    def read_results(self, waiting: Sequence[ReplicaHandle]) -> BackendError | None:
        """Read the results of those that have succeeded; return an error that may pass."""
        error: BackendError | None = None
        for handle in filter(self.succeeded, waiting):
            try:
                self.results[handle] = self.result_of(handle)
            except (ResultLostError, ReplicaNotFoundError) as gone:
                self.results[handle] = None
                self.lost[handle] = readable(f"{RESULT_LOST}{gone}")
            except BackendError as caught:
                if caught.retryable:
                    error = caught
                else:
                    self.unreadable[handle] = caught  # keep waiting for the others
        return error


def _warn_of_failure(
    ranks: Sequence[ReplicaHandle],
    known: Mapping[ReplicaHandle, ReplicaStatus],
    warned: dict[ReplicaHandle, int],
) -> None:
    """Log which replicas of a run have failed for good while others go on, once for each.

    It waits for a second look: the others may end at nearly the same time. A replica that has
    failed because of another is only named where no other is known to have failed.
    """
    statuses = {handle: known[handle] for handle in ranks if handle in known}
    if len(statuses) == len(ranks) and all(status.state.terminal for status in statuses.values()):
        return
    failed = [
        handle
        for handle, status in statuses.items()
        if status.state is ReplicaState.FAILED and status.reason is not Reason.LOST
    ]
    failed = [handle for handle in failed if _VICTIM not in known[handle].message] or failed
    looks = {handle: warned.get(handle, 0) + 1 for handle in failed}
    warned.update(looks)
    new = [handle for handle, number in looks.items() if number == 2]
    if not new:
        return
    first = min(new, key=lambda handle: known[handle].finished_at or float("inf"))
    status = known[first]
    others = f" (and {len(new) - 1} more)" if len(new) > 1 else ""
    attempts = f" after {status.attempt} attempts" if status.attempt > 1 else ""
    why = redact_and_cut(status.message.partition("\n")[0], _SHOWN).rstrip(".")
    log(
        f"rank {first.rank}{others} of run {first.run_id!r} has failed for good{attempts}: {why}. "
        "The others go on without it, or wait until they give up; "
        f"to end them, cancel the run: diloco cancel {first.run_id}, or cancel_run() in Python"
    )


def by_run(
    handles: Sequence[ReplicaHandle], place_of: Callable[[ReplicaHandle], Hashable]
) -> list[list[ReplicaHandle]]:
    """Return the handles of each run, without duplicates; ``place_of`` is that of `collect`."""
    runs: dict[Hashable, list[ReplicaHandle]] = {}
    for handle in dict.fromkeys(handles):
        run = handle.backend_name, handle.run_id, place_of(handle)
        runs.setdefault(run, []).append(handle)
    return list(runs.values())


def log(warning: str) -> None:
    """Log a warning."""
    import logging  # slow to import

    logging.getLogger("diloco_protocol").warning("%s", warning)


def to_result(
    handle: ReplicaHandle, status: ReplicaStatus, result: Any, lost: str | None
) -> ReplicaResult:
    """Return a status as an entry of the list that ``collect`` returns.

    ``lost`` says why the result of a success is missing.
    """
    state, exit_code, error = status.state, status.exit_code, lost
    if state is ReplicaState.SUCCEEDED:
        exit_code = 0
    elif state is ReplicaState.CANCELLED or not state.terminal:
        exit_code = None
    elif exit_code == 0:
        exit_code = 1
    if state.terminal and state is not ReplicaState.SUCCEEDED:
        error = status.message or f"the replica {state}"
    entry: dict[str, Any] = {
        **handle.metadata,
        "rank": handle.rank,
        "status": state.value,
        "exit_code": exit_code,
        "error": error,
        "result": result,
        "reason": None if status.reason is None else status.reason.value,
        "signal": status.signal,
        "attempt": status.attempt,
        "run_id": handle.run_id,
    }
    return entry  # type: ignore[return-value] # the backend's own ids come on top of the keys
