"""The records that are written about a run and its replicas, and how they are read again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco_protocol import (
    BackendError,
    DilocoError,
    Outcome,
    ReplicaSpec,
    SpecVersionError,
)
from diloco_protocol.backend import (
    MAX_REPLICAS,
    OUTCOME_BYTES,
    check_seconds,
    check_texts,
    check_whole,
    or_none,
    seconds,
    shown,
    text_like,
    whole,
)

from ._files import DamagedFileError, read_bytes, read_json, reading
from ._processes import ProcessId
from ._rundir import AttemptDir, RunDir
from ._verdict import LATEST, Stop

RECORD_VERSION = 3


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
        record = RunRecord(**{name: check(name, data[name]) for name, check in _CHECKS.items()})
        # Handles are made from the record, and the names in it lead to folders.
        if record.run_id != run.path.name:
            raise ValueError(f"it is the record of {shown(record.run_id)}")
        if record.ranks[-1] >= record.world_size:
            raise ValueError(f"world_size is {record.world_size}")
        return record


def _check_ranks(name: str, value: Any) -> tuple[int, ...]:
    ranks = tuple(check_whole(name, rank, 0, MAX_REPLICAS) for rank in value)
    if not ranks or list(ranks) != sorted(set(ranks)):
        raise ValueError(f"{name} is no list of ascending numbers")
    return ranks


_TEXT = text_like("(?s).*", "text")
_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    # It is used in the environment of processes, and in the names of folders.
    "uid": text_like("[a-z0-9-]{1,48}", "a name"),
    **dict.fromkeys(("run_id", "fingerprint", "cohort", "host", "namespace"), _TEXT),
    "ranks": _check_ranks,
    "world_size": whole(1, MAX_REPLICAS),
    "timeout": or_none(seconds(LATEST, positive=True)),
    **dict.fromkeys(("grace", "created_at"), seconds(LATEST)),
    "max_restarts": whole(0, 1000),
    "labels": check_texts,
}


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
            attempt=check_whole("attempt", data["attempt"], 0, 1_000_000_000),
            phase=_TEXT("phase", data["phase"]),
            runner=None if data["runner"] is None else ProcessId.from_dict(data["runner"]),
            known=tuple(map(ProcessId.from_dict, data["known"])),
            started_at=check_seconds("started_at", data["started_at"], most=LATEST),
            stop=Stop.from_dict(data["stop"]),
            deadline=or_none(seconds(LATEST))("deadline", data["deadline"]),
        )
