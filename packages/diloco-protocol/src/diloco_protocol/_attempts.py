"""Attempts of one replica in one place: failed ones are started again, and all are counted, over interruptions too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._bounds import read_bounded
from ._fields import LARGEST
from ._json import dumps, loads
from ._outcome import REPLACED_CODE

if TYPE_CHECKING:
    from ._outcome import Outcome
    from ._spec import ReplicaSpec

_MOST_BYTES = 4096


class AttemptCounter:
    """Counts the attempts of a replica and those that have failed; in a file, if it is to outlive this machine.

    What cannot be read counts as nothing: a replica that starts with too small a number is better
    than one that does not start.

    Args:
        path: The file, which a platform brings back after an interruption; its folder is made.
            None: only in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.started, self.failed = (0, 0) if path is None else _read(path)

    def start(self) -> None:
        """One more attempt begins.

        Raises:
            OSError: It cannot be written down.
        """
        self.started += 1
        self._save()

    def fail(self) -> None:
        """The attempt has failed.

        Raises:
            OSError: It cannot be written down.
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
    run: Callable[[ReplicaSpec], Outcome],
    told_to_end: Callable[[], bool],
    counter: AttemptCounter,
    restarts: int,
) -> Outcome:
    """Run a replica, and run it again while it fails; returns the outcome of its last attempt.

    An interruption is an attempt and no failure, so it uses up no restart. Who was told to end is
    not started again, nor is who was replaced.

    Args:
        spec: What the first attempt is told; later ones have higher numbers.
        run: Runs one attempt to its end.
        told_to_end: Whether a signal to end has come.
        counter: Attempts before this one, and where further ones are written down.
        restarts: How often a failed attempt is started again.

    Raises:
        OSError: An attempt cannot be started or written down.
    """
    first = spec.attempt
    while True:
        spec = replace(spec, attempt=first + counter.started)
        counter.start()
        outcome = run(spec)
        if outcome.exit_code in {0, REPLACED_CODE} or told_to_end():
            return outcome
        counter.fail()
        if counter.failed > restarts:
            return outcome


def _read(path: Path) -> tuple[int, int]:
    try:
        with path.open("rb") as file:
            data: Any = loads(read_bounded(file, _MOST_BYTES, str(path)).decode(), str(path))
        started, failed = data["started"], data["failed"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0
    whole = type(started) is int and type(failed) is int
    # Far from the largest attempt, which is counted from the one of the spec.
    return (started, failed) if whole and 0 <= failed <= started < LARGEST // 2 else (0, 0)
