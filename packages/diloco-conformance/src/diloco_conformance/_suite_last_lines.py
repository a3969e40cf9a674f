"""The last lines of a log that is followed: G3."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest

from ._harness import Step
from ._lab import Lab
from ._model import Replica
from ._stepping import FEW, Place, each_line

PIECE = 0.05
PIECES = 6
"""The pause between two looks at a follower, in real seconds, and a number of looks.

After that many looks without a line of its own, the follower is taken to wait.
"""


class LastLines:
    """A fixed test of G3."""

    def test_g3_what_is_written_last_is_not_lost(self, lab: Lab) -> None:
        """Let the replica write and end between any two lines of the executor that follows it."""
        lab.needs(Step.PRINT)
        if lab.harness.starts_by_itself:
            pytest.skip("a replica would have to be started for every line of the executor")
        first, second = self._looks(lab)
        for number in range(first, second + 1, max(1, math.ceil((second - first) / FEW))):
            replica = lab.up().replicas[0]
            lines = _Following(lab, replica, lambda passed, n=number: passed == n).lines()  # type: ignore[misc]
            if lines != ["the first", "the last"]:
                lab.broken(
                    "G3",
                    f"log_iter gave {lines}",
                    f"{replica} wrote 'the first' and 'the last', and ended just when the "
                    f"executor had been at work for {number} lines of its own. Who asks whether "
                    "it has ended must do so before reading, not after",
                )

    def _looks(self, lab: Lab) -> tuple[int, int]:
        """Return how many lines an executor had run when it first waited, and when next.

        It waits for more of a log; the lines are those of its own code.
        """
        moments: dict[float, int] = {}

        def twice(passed: int) -> bool:
            moments.setdefault(lab.harness.clock(), passed)
            return len(moments) > 2

        following = _Following(lab, lab.up().replicas[0], twice)
        following.lines()
        began = [*moments.values(), following.passed]
        return began[1], began[2] if len(began) > 2 else following.passed


class _Following:
    """A follower of the log of a replica, which writes a last line and ends at a given moment.

    The replica has written one line before.
    """

    def __init__(self, lab: Lab, replica: Replica, when: Callable[[int], bool]) -> None:
        self._lab, self._replica, self._when = lab, replica, when
        self._over, self._one = threading.Event(), threading.Lock()
        self.passed = 0

    def lines(self) -> list[str]:
        """Return the lines that the log gives."""
        self._lab.drive(self._replica, Step.PRINT, ["the first"])
        watching = threading.Thread(target=self._watch, daemon=True)
        watching.start()
        try:
            return self._lab.verb("G3", self._follow)
        finally:
            self._over.set()
            watching.join()

    def _follow(self) -> list[str]:
        executor = self._lab.executor
        with each_line(executor, self._act):
            return list(executor.log_iter(self._replica.handle, follow=True))

    def _act(self, _: Place) -> None:
        if not self._over.is_set():
            self.passed += 1
            if self._when(self.passed):
                self._finish()

    def _finish(self) -> None:
        with self._one:
            if not self._over.is_set():
                self._lab.drive(self._replica, Step.PRINT, ["the last"])
                self._lab.drive(self._replica, Step.SUCCEED)
                self._over.set()

    def _watch(self) -> None:
        """Finish while an executor waits for the platform, instead of between two of its lines."""
        still, passed = 0, 0
        while not self._over.wait(PIECE):
            still, passed = still + 1 if passed == self.passed else 0, self.passed
            if still == PIECES:
                self._finish()
