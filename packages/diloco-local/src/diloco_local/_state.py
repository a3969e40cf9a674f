"""The supervisor's knowledge of a living attempt, in ``state.json``.

It is for processes that observe the replica, and for a supervisor that goes on after this one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from diloco_protocol.backend import shown

from ._files import read_json, reading
from ._identity import ProcessId
from ._verdict import Stop, unix_seconds

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

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return asdict(self)


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
