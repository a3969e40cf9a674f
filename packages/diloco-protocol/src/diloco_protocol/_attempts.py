"""Attempts of one replica in one place.

Failed attempts are started again, and all attempts are counted, across interruptions too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._bounds import read_bounded
from ._fields import LARGEST
from ._json import dumps, loads
from ._outcome import FINAL_CODE

if TYPE_CHECKING:
    from ._outcome import Outcome
    from ._spec import ReplicaSpec

_MOST_BYTES = 4096


class AttemptCounter:
    """Counts the attempts of a replica and those that have failed.

    The counts are kept in a file if they have to outlive this machine. A file that cannot be read
    counts as zero attempts: a replica that starts with too small a number is better than one that
    does not start.

    Args:
        path: The file, which a platform brings back after an interruption. Its folder is made if it
            is missing. None: the counts are only kept in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.started, self.failed = (0, 0) if path is None else _read(path)

    def start(self) -> None:
        """Count one more attempt, which begins now.

        Raises:
            OSError: The counts cannot be written to the file.
        """
        self.started += 1
        self._save()

    def fail(self) -> None:
        """Count the attempt as failed.

        Raises:
            OSError: The counts cannot be written to the file.
        """
        self.failed += 1
        self._save()

    def _save(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f"{self._path.name}.partial")
        partial.write_text(dumps({"started": self.started, "failed": self.failed}))
        partial.replace(self._path)


def run_attempts(
    spec: ReplicaSpec,
    run: Callable[[ReplicaSpec, bool], Outcome],
    told_to_end: Callable[[], bool],
    counter: AttemptCounter,
    restarts: int | None,
) -> Outcome:
    """Run a replica, and run it again while it fails. Return the outcome of its last attempt.

    An interruption counts as an attempt, but not as a failure, so it uses up no restart. A replica
    that was told to end is not started again, and neither is one whose error is
    final.

    Args:
        spec: The spec of the first attempt; later ones have higher attempt numbers.
        run: Runs one attempt to its end. It is told whether another follows in no case if this one
            fails.
        told_to_end: Says whether a signal to end has come.
        counter: Counts the attempts before this call and those that it starts.
        restarts: How often a failed attempt is started again. None: not here, but perhaps by what
            called this.

    Raises:
        OSError: An attempt cannot be started, or its count cannot be written to the file.
    """
    first = spec.attempt
    while True:
        spec = replace(spec, attempt=first + counter.started)
        counter.start()
        last = restarts is not None and counter.failed >= restarts
        outcome = run(spec, last)
        if outcome.exit_code in {0, FINAL_CODE} or told_to_end():
            return outcome
        counter.fail()
        if restarts is None or last:
            return outcome


def _read(path: Path) -> tuple[int, int]:
    try:
        with path.open("rb") as file:
            data: Any = loads(read_bounded(file, _MOST_BYTES, str(path)).decode(), str(path))
        started, failed = data["started"], data["failed"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0
    whole = type(started) is int and type(failed) is int
    # Far below the largest attempt number, because the spec's own attempt number is added to it.
    return (started, failed) if whole and 0 <= failed <= started < LARGEST // 2 else (0, 0)
