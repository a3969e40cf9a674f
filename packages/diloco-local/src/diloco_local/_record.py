"""What is written about a run, in and out of JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from diloco_protocol import (
    DilocoError,
    Outcome,
    Reason,
    ReplicaState,
    ReplicaStatus,
    SpecVersionError,
)

from ._files import read_bytes, read_json
from ._rundir import AttemptDir, RunDir

RECORD_VERSION = 2


@dataclass(frozen=True, slots=True)
class RunRecord:
    """``run.json``: what was launched, where and when.

    Attributes:
        uid: Never used twice; a run that was purged and launched anew under its old name has another one.
        run_id: The run's name.
        fingerprint: Digest of everything the launch asked for.
        ranks: The ranks launched here, ascending.
        world_size: The replicas of the whole cohort, which may be more.
        cohort: The cohort's name.
        grace: Seconds between SIGTERM and SIGKILL.
        timeout: Seconds an attempt may last, or None.
        max_restarts: How often a failed attempt is started again.
        created_at: Unix seconds.
        host: The machine.
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
        """What the processes of a replica carry in their environment."""
        return f"{self.uid}/{rank}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"version": RECORD_VERSION, **asdict(self), "ranks": list(self.ranks)}


def read_record(run: RunDir) -> RunRecord | None:
    """The record of a run, or None if there is no such run.

    Raises:
        SpecVersionError: It was written by another version of this package.
    """
    data = read_json(run.record)
    if data is None:
        return None
    version = data.pop("version", None)
    if version != RECORD_VERSION:
        raise SpecVersionError(
            f"{run.record} has version {version!r}, this diloco-local reads {RECORD_VERSION}: "
            "use the version that launched the run"
        )
    return RunRecord(**{**data, "ranks": tuple(data["ranks"])})


def outcome_of(attempt: AttemptDir) -> tuple[Outcome | None, str]:
    """What the runner of an attempt reported.

    Returns:
        The outcome, None if there is none or it cannot be read; and in the latter case what is wrong with it. A runner
        of another version must not keep the supervisor from its work.
    """
    try:
        data = read_bytes(attempt.outcome)
        return (None, "") if data is None else (Outcome.from_json(data.decode()), "")
    except (DilocoError, UnicodeDecodeError) as error:
        return None, f"the outcome that the runner reported cannot be read: {error}"


def status_to_dict(status: ReplicaStatus) -> dict[str, Any]:
    """As JSON."""
    return asdict(status)


def status_from_dict(data: dict[str, Any]) -> ReplicaStatus:
    """The inverse of `status_to_dict`."""
    reason = data["reason"]
    return ReplicaStatus(
        **{
            **data,
            "state": ReplicaState(data["state"]),
            "reason": None if reason is None else Reason(reason),
        }
    )
