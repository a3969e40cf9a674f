"""Observe what is true of a replica now, from its files and the process table; change nothing."""

from __future__ import annotations

from dataclasses import replace

from diloco_protocol import BackendError, InvalidRequestError, Reason, ReplicaState, ReplicaStatus
from diloco_protocol.backend import status_from_data

from ._files import DamagedFileError, check_own_folder, is_locked, read_json, reading
from ._processes import members, pid_namespace
from ._record import AttemptState, RunRecord, outcome_of, read_state
from ._replica import Phase
from ._rundir import ReplicaDir, RunDir
from ._verdict import Stop, verdict

# Errors of a replica's file that cannot be used. They do not concern its siblings: other evidence
# decides the replica's state.
_UNUSABLE = (DamagedFileError, InvalidRequestError)


def observe_replica(run: RunDir, record: RunRecord, rank: int) -> ReplicaStatus:
    """Return the status of one replica.

    The terminal record counts if there is one. Otherwise a living supervisor (or guardian) answers
    for the replica. If both were killed, the processes and the outcome file decide; so they do if
    the terminal record is damaged.

    Raises:
        BackendError: The replica has no supervisor, and its processes live in a PID namespace that
            cannot be seen from here.
    """
    files = run.replica(rank)
    try:
        check_own_folder(files.path)
    except InvalidRequestError as error:
        return _refused(run, record, rank, str(error))
    if not files.path.exists():
        return _refused(run, record, rank, f"{files.path} was removed: what it held is not known")
    # The second round is for a supervisor that wrote the record and ended between the two looks.
    for _ in range(2):
        try:
            final = read_json(files.final)
            if final is not None and not _lives(files, record, rank):
                with reading(files.final):
                    status = status_from_data(final)
                    if not status.state.terminal:  # it would never be looked at again
                        raise ValueError(f"the state {status.state.value!r} is no end")
                    return status
        except _UNUSABLE as error:
            status = _unsupervised(files, record, rank)
            return replace(status, message=" ".join(filter(None, (status.message, f"({error})"))))
        if is_locked(run.lock):
            return _supervised(files)
    return _unsupervised(files, record, rank)


def _lives(files: ReplicaDir, record: RunRecord, rank: int) -> bool:
    """Say whether a process of the replica lives that its supervisor has written down.

    If one does, a terminal record of the replica is not true.
    """
    try:
        return any(process.alive() for process in read_state(files.state).processes)
    except _UNUSABLE:
        return bool(members(record.marker(rank)))


def _state(files: ReplicaDir) -> tuple[AttemptState, str]:
    """Return what the supervisor has written about a replica, and what is wrong with that.

    If it cannot be used, the state is the one that the replica's folder shows.
    """
    try:
        return read_state(files.state), ""
    except _UNUSABLE as error:
        attempts = len(files.attempts())
        phase = Phase.RUNNING if attempts else Phase.STARTING
        return AttemptState(attempts, phase), str(error)


def _supervised(files: ReplicaDir) -> ReplicaStatus:
    state, problem = _state(files)
    stopping = files.cancelled_at() is not None or state.stop is not None
    starting = state.phase == Phase.STARTING
    return ReplicaStatus(
        state=ReplicaState.PENDING if starting else ReplicaState.RUNNING,
        attempt=max(1, state.attempt),
        reason=Reason.CANCEL_REQUESTED if stopping else Reason.STARTING if starting else None,
        stopping=stopping,
        message=problem,
        started_at=None if starting or problem else state.started_at,
        native="" if starting else state.phase,
    )


def _unsupervised(files: ReplicaDir, record: RunRecord, rank: int) -> ReplicaStatus:
    _check_namespace(record, rank)
    state, problem = _state(files)
    attempt = max(1, state.attempt)
    started_at = state.started_at or None
    cancelled_at = files.cancelled_at()
    if members(record.marker(rank), state.processes):
        return ReplicaStatus(
            state=ReplicaState.RUNNING,
            attempt=attempt,
            reason=None if cancelled_at is None else Reason.CANCEL_REQUESTED,
            stopping=cancelled_at is not None,
            started_at=started_at,
            message=problem or "its supervisor was killed; the replica goes on without it",
            native="unsupervised",
        )
    outcome, unreadable = outcome_of(files.attempt(attempt))
    stop = state.stop
    if stop is None and cancelled_at is not None and (outcome is None or outcome.signal):
        stop = Stop(Reason.CANCEL_REQUESTED, cancelled_at)
    return verdict(
        attempt=attempt,
        outcome=outcome,
        wait_status=None,
        stop=stop,
        problem=unreadable or problem,
        started_at=started_at,
    )


def _refused(run: RunDir, record: RunRecord, rank: int, why: str) -> ReplicaStatus:
    """Return the status of a replica in whose folder nothing is read.

    It holds for this replica alone, which may itself have made its folder unusable.
    """
    files = run.replica(rank)
    cancelled_at = files.cancelled_at()
    stop = None if cancelled_at is None else Stop(Reason.CANCEL_REQUESTED, cancelled_at)
    over = files.final_outside.exists()
    if not over and not is_locked(run.lock):
        _check_namespace(record, rank)
        over = not members(record.marker(rank), ())
    if over:
        return verdict(attempt=1, outcome=None, wait_status=None, stop=stop, problem=why)
    reason = None if stop is None else stop.reason
    return ReplicaStatus(
        ReplicaState.RUNNING, reason=reason, stopping=stop is not None, message=why
    )


def _check_namespace(record: RunRecord, rank: int) -> None:
    if record.namespace != pid_namespace():
        raise BackendError(
            f"replica {rank} of run {record.run_id!r} has lost its supervisor, and its processes "
            "are in another PID namespace (container): ask again from inside that container",
            retryable=False,
        )
