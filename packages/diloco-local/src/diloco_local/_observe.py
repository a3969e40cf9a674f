"""What is true of a replica right now, read from its files and the process table; changes nothing."""

from __future__ import annotations

from diloco_protocol import BackendError, Reason, ReplicaState, ReplicaStatus
from diloco_protocol.backend import status_from_data

from ._files import is_locked, read_json, reading
from ._identity import pid_namespace
from ._processes import members
from ._record import RunRecord, outcome_of
from ._replica import Phase
from ._rundir import ReplicaDir, RunDir
from ._state import read_state
from ._verdict import Stop, unix_seconds, verdict


def observe_replica(run: RunDir, record: RunRecord, rank: int) -> ReplicaStatus:
    """The status of one replica.

    The terminal record counts if there is one. Else a living supervisor (or guardian) answers for the replica. Else,
    both having been killed, the processes and the outcome file tell.

    Raises:
        BackendError: Nobody supervises, and the processes live in a PID namespace that cannot be seen from here.
    """
    files = run.replica(rank)
    # The second round is for a supervisor that wrote the record and left between the two looks.
    for _ in range(2):
        final = read_json(files.final)
        if final is not None:
            with reading(files.final):
                return _end(status_from_data(final))
        if is_locked(run.lock):
            return _supervised(files)
    return _unsupervised(files, record, rank)


def _end(status: ReplicaStatus) -> ReplicaStatus:
    if not status.state.terminal:  # it would never be looked at again
        raise ValueError(f"the state {status.state.value!r} is no end")
    return status


def _supervised(files: ReplicaDir) -> ReplicaStatus:
    state = read_state(files.state)
    stopping = files.cancel.exists() or state.stop is not None
    attempt = max(1, state.attempt)
    if state.phase == Phase.STARTING:
        return ReplicaStatus(
            state=ReplicaState.PENDING,
            attempt=attempt,
            reason=Reason.CANCEL_REQUESTED if stopping else Reason.STARTING,
            stopping=stopping,
        )
    return ReplicaStatus(
        state=ReplicaState.RUNNING,
        attempt=attempt,
        reason=Reason.CANCEL_REQUESTED if stopping else None,
        stopping=stopping,
        started_at=state.started_at,
        native=state.phase,
    )


def _unsupervised(files: ReplicaDir, record: RunRecord, rank: int) -> ReplicaStatus:
    if record.namespace != pid_namespace():
        raise BackendError(
            f"replica {rank} of run {record.run_id!r} has lost its supervisor, and its processes are in another "
            "PID namespace (container): ask again from inside that container",
            retryable=False,
        )
    state = read_state(files.state)
    attempt = max(1, state.attempt)
    started_at = state.started_at or None
    mark = read_json(files.cancel)
    if members(record.marker(rank), state.processes):
        return ReplicaStatus(
            state=ReplicaState.RUNNING,
            attempt=attempt,
            reason=Reason.CANCEL_REQUESTED if mark else None,
            stopping=mark is not None,
            started_at=started_at,
            message="its supervisor was killed; the replica goes on without it",
            native="unsupervised",
        )
    outcome, problem = outcome_of(files.attempt(attempt))
    stop = state.stop
    if stop is None and mark and (outcome is None or outcome.signal):
        with reading(files.cancel):
            stop = Stop(Reason.CANCEL_REQUESTED, unix_seconds(mark["at"]))
    return verdict(
        attempt=attempt,
        outcome=outcome,
        wait_status=None,
        stop=stop,
        problem=problem,
        started_at=started_at,
    )
