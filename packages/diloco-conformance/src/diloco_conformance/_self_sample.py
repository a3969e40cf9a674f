"""The sample that a harness is tried on: a run of two replicas, both running."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from diloco_protocol import ReplicaHandle

from ._blame import fault
from ._harness import Step, Truth
from ._lab import Lab
from ._self_options import close


class Sample:
    """A run of two running replicas, for the checks to look at.

    Attributes:
        lab: The lab in which it was launched.
        harness: The lab's harness.
        number: How many other launches were tried.
        first: Its first replica, which is made to succeed in the course of the checks.
        second: Its second replica, which goes on.
    """

    def __init__(self, lab: Lab) -> None:
        self.lab, self.harness, self.number = lab, lab.harness, 0
        if quiet := self.living():
            fault(
                self.harness,
                f"living() is {quiet} in a fresh world, before anything was launched: every test "
                "must find a world of its own, in which nothing lives",
                "living",
            )
        run = lab.launch(2)
        for replica in run.replicas:
            self._truth(replica.handle)
            lab.drive(replica, Step.START)
        self.first, self.second = run.replicas
        alive = sum(self._truth(handle).alive for handle in run.handles)
        if (counted := self.living()) < alive:
            fault(
                self.harness,
                f"living() was 0 before a launch of two replicas, and is {counted} now, although "
                f"truth() says that {alive} of them are alive: it must count what lives in the "
                "world at this moment",
                "living",
            )
        if any(self._truth(handle).stopping for handle in run.handles):
            fault(
                self.harness,
                f"truth() returned {self._truth(run.handles[0])} of a replica that the suite has "
                "not ended: stopping must say whether its end was asked for",
                "truth",
            )

    @contextlib.contextmanager
    def fresh(self) -> Iterator[Any]:
        """Make an executor that has seen nothing, and close it after the block."""
        executor = self.harness.make_executor()
        try:
            yield executor
        finally:
            close(self.harness, executor)

    def ask(self, call: Callable[[], Any]) -> Any:
        """Return what a verb gives; the call must come back."""
        return self.lab.within("S4", call)

    def living(self) -> int:
        """Return how many replicas live, and check that it is a whole number."""
        value = self.harness.living()
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            fault(
                self.harness,
                (
                    f"living() returned {value!r}: it must return how many replicas are alive, a "
                    "whole number"
                ),
                "living",
            )
        return value

    def _truth(self, handle: ReplicaHandle) -> Truth:
        truth = self.harness.truth(handle)
        if not isinstance(truth, Truth):
            fault(
                self.harness,
                f"truth() returned {truth!r}: it must return a Truth(state, alive=…)",
                "truth",
            )
        kinds = {"alive": bool, "attempt": int, "stopping": bool}
        for name, kind in kinds.items():
            if not isinstance(value := getattr(truth, name), kind):
                fault(
                    self.harness,
                    f"truth() returned {truth}: {name} must be {kind.__name__}, not {value!r}",
                    "truth",
                )
        return truth
