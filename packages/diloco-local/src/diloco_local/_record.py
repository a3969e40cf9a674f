"""The records that are written about a run and its replicas, and how they are read again."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from diloco_protocol import (
    BackendError,
    DilocoError,
    Outcome,
    ReplicaSpec,
    SpecVersionError,
)
from diloco_protocol.backend import MAX_REPLICAS, OUTCOME_BYTES, is_run_id, shown

from ._files import DamagedFileError, read_bytes, read_json, reading
from ._processes import ProcessId
from ._rundir import AttemptDir, RunDir
from ._verdict import LATEST, Stop, unix_seconds

RECORD_VERSION = 3
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("uid", "run_id", "fingerprint", "cohort", "host", "namespace"), (str,)),
    **dict.fromkeys(("world_size", "max_restarts"), (int,)),
    **dict.fromkeys(("grace", "created_at"), (float, int)),
    "timeout": (float, int, type(None)),
    "ranks": (tuple,),
    "labels": (dict,),
}


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The content of ``run.json``: what was launched, where and when.

    Attributes:
        uid: An id that is never used twice; a run that was purged and launched anew under its old
            name has another one. Its folders are named after it.
        run_id: The run's name.
        fingerprint: Digest of everything the launch asked for.
        ranks: The ranks launched here, ascending.
        world_size: The number of replicas in the whole cohort, which may be larger.
        cohort: The cohort's name.
        grace: Seconds between SIGTERM and SIGKILL.
        timeout: Seconds an attempt may last, or None.
        max_restarts: How often a failed attempt is started again.
        created_at: The time of the launch, in Unix seconds.
        host: The name of the machine.
        namespace: The PID namespace.
        labels: The launch's labels.
    """

    uid: str
    run_id: str
    fingerprint: str
    ranks: tuple[int, ...]
    world_size: int
    cohort: str
    grace: float
    timeout: float | None
    max_restarts: int
    created_at: float
    host: str
    namespace: str
    labels: dict[str, str]

    def marker(self, rank: int) -> str:
        """Return the marker that the processes of a replica carry in their environment."""
        return marker(self.uid, rank)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return {"version": RECORD_VERSION, **asdict(self), "ranks": list(self.ranks)}


class OtherVersionError(BackendError, SpecVersionError):
    """The error of a run whose records another version of this package wrote in another way."""


def marker(uid: str, rank: int) -> str:
    """Return the marker that the processes of a replica carry in their environment."""
    return f"{uid}/{rank}"


def read_record(run: RunDir) -> RunRecord | None:
    """Return the record of a run, or None if there is no such run.

    Raises:
        OtherVersionError: It was written by another version of this package.
        DamagedFileError: The file is not such a record.
    """
    data = read_json(run.record)
    if data is None:
        return None
    if not isinstance(data, dict):
        raise DamagedFileError(f"{run.record} does not hold what is written there: {shown(data)}")
    version = data.pop("version", None)
    if version != RECORD_VERSION:
        raise OtherVersionError(
            f"{run.record} has version {shown(version)}, this diloco-local reads {RECORD_VERSION}: "
            "use the version that launched the run"
        )
    with reading(run.record):
        record = _checked(RunRecord(**{**data, "ranks": tuple(data["ranks"])}))
        # Handles are made from the record, and the names in it lead to folders.
        if record.run_id != run.path.name:
            raise ValueError(f"it is the record of {shown(record.run_id)}")
        return record


def _checked(record: RunRecord) -> RunRecord:
    for field in fields(record):
        value = getattr(record, field.name)
        if type(value) not in _KINDS[field.name]:
            raise ValueError(f"{field.name} is {shown(value)}")
    if set(map(type, record.ranks)) != {int} or list(record.ranks) != sorted(set(record.ranks)):
        raise ValueError("ranks is no list of ascending numbers")
    if not 0 <= record.ranks[0] <= record.ranks[-1] < record.world_size <= MAX_REPLICAS:
        raise ValueError(f"world_size is {shown(record.world_size)}")
    if record.timeout is not None and not 0 < record.timeout <= LATEST:
        raise ValueError(f"timeout is {shown(record.timeout)}")
    for name in ("grace", "created_at"):
        unix_seconds(getattr(record, name))
    # It is used in the environment of processes, and in the names of folders.
    if not is_run_id(record.uid):
        raise ValueError(f"uid is {shown(record.uid)}")
    if any(type(text) is not str for pair in record.labels.items() for text in pair):
        raise ValueError(f"labels is {shown(record.labels)}")
    return record


def rendezvous_of(attempt: AttemptDir) -> str | None:
    """Return where the replica of an attempt meets the others, by its spec; None without one."""
    data = read_json(attempt.spec)
    with reading(attempt.spec):
        return None if data is None else ReplicaSpec.from_dict(data).rendezvous_uri


def outcome_of(attempt: AttemptDir) -> tuple[Outcome | None, str]:
    """Return what the runner of an attempt reported.

    Returns:
        The outcome, None if there is none or it cannot be read; and in the latter case what is
            wrong with it. A runner of another version must not keep the supervisor from its work.

    Raises:
        BackendError: The system is short of file descriptors, so that the outcome cannot be known
            at the moment.
    """
    try:
        data = read_bytes(attempt.outcome, OUTCOME_BYTES)
        return (None, "") if data is None else (Outcome.from_json(data.decode()), "")
    except (DilocoError, UnicodeDecodeError) as error:
        if getattr(error, "retryable", False):
            raise
        return None, f"the outcome that the runner reported cannot be read: {error}"


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class AttemptState:
    """The known facts about an attempt; the defaults are for one of which nothing is written.

    Attributes:
        attempt: Its number; 0 before the first.
        phase: What the supervisor does with it.
        runner: Its runner, if it was seen alive.
        known: The processes that were seen in it.
        started_at: Unix seconds; 0 before the first start.
        stop: Why it is being ended; None if it is not.
        deadline: The time at which it has to be over, by ``time.monotonic``, which cannot be set;
            None if that is not known.
    """

    attempt: int = 0
    phase: str = "starting"
    runner: ProcessId | None = None
    known: tuple[ProcessId, ...] = ()
    started_at: float = 0.0
    stop: Stop | None = None
    deadline: float | None = None

    @property
    def processes(self) -> list[ProcessId]:
        """Return all processes that were seen."""
        return [*self.known, *([] if self.runner is None else [self.runner])]


def read_state(path: Path) -> AttemptState:
    """Return the state that is written in a file; the defaults if there is none.

    Raises:
        DamagedFileError: The file holds something else.
    """
    data = read_json(path)
    if data is None:
        return AttemptState()
    with reading(path):
        return AttemptState(
            attempt=_attempt(data["attempt"]),
            phase=_is(str, data["phase"]),
            runner=None if data["runner"] is None else ProcessId.from_dict(data["runner"]),
            known=tuple(ProcessId.from_dict(item) for item in _is(list, data["known"])),
            started_at=unix_seconds(data["started_at"]),
            stop=Stop.from_dict(data["stop"]),
            deadline=None if (at := data.get("deadline")) is None else unix_seconds(at),
        )


def _attempt(value: object) -> int:
    number = _is(int, value)
    if not 0 <= number < 1_000_000_000:
        raise ValueError("attempts are counted from 1")
    return number


def _is(kind: type[_T], value: object) -> _T:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{shown(value)} is no {kind.__name__}")
    return value
