"""The lab, where executor, world and model meet: all that a test does is checked and noted here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

from diloco_protocol import BackendError, ReplicaNotFoundError

from ._harness import Ability, Fault, Harness, Operation, Step
from ._lab_hand import Hand
from ._promises import HarnessFault

if TYPE_CHECKING:
    from diloco_protocol import BaseExecutor, Capabilities

    from ._model import Run


class Lab(Hand):
    """One example: a world, the executor under test, and the model of what must be true.

    Attributes:
        harness: The world.
        executor: The present executor; :meth:`forget` makes a new one.
        capabilities: What the executor declares.
        runs: All runs so far.
        history: What was done so far, one sentence for each step.
        disturbed: Whether the backend is disturbed at present.
        hung: Whether a call did not come back.
    """

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.executor: BaseExecutor = harness.make_executor()
        self.capabilities: Capabilities = self.executor.capabilities
        self.runs: list[Run] = []
        self.history: list[str] = []
        self.last = "launch"
        self.disturbed = self.hung = False
        self._declared()

    # --- what can be done here ---

    def _declared(self) -> None:
        known = {*Step, *Fault, *Operation, *Ability}
        wrong = [name for name in self.harness.cannot if name not in known]
        needed = [
            name for name in (Step.START, Step.SUCCEED, Step.FAIL) if name in self.harness.cannot
        ]
        silent = [name for name, why in self.harness.cannot.items() if not str(why).strip()]
        if wrong or needed or silent:
            raise HarnessFault(
                "cannot= may name a Step, Fault, Operation or Ability with a reason, but not "
                f"start, succeed or fail: unknown {wrong}, needed {needed}, without a reason "
                f"{silent}"
            )

    def can(self, *needs: str) -> bool:
        """Say whether this world can do all of that, and so can the backend by what it declares."""
        return self._obstacle(needs) is None

    def needs(self, *needs: str) -> None:
        """Skip the test, with the declared reason, unless all of that can be done."""
        obstacle = self._obstacle(needs)
        if obstacle is not None:
            pytest.skip(obstacle)

    def faults(self, *faults: Fault) -> list[Fault]:
        """Return those of these faults that this world has.

        If it has none, skip the test, which would pass without having checked anything.
        """
        able = [fault for fault in faults if self.can(fault)]
        if not able:
            self.needs(*faults)
        return able

    def _obstacle(self, needs: Sequence[str]) -> str | None:
        for need in needs:
            if need == Step.PREEMPT and not self.capabilities.preemptible:
                return "the backend declares that its replicas are not preemptible"
            if need in self.harness.cannot:
                return (
                    f"the harness leaves out {str(need)!r}, and says why: "
                    f"{self.harness.cannot[need]}"
                )
        return None

    @property
    def unit(self) -> float:
        """Return a time that is short in this world: 1 s where the short timeout is a minute."""
        return self.harness.short_timeout / 60

    # --- disturbances, and the end ---

    @contextlib.contextmanager
    def fault(self, operation: Operation, fault: Fault, *, after: int = 0) -> Iterator[None]:
        """Disturb the calls to the backend while the block runs."""
        self.note(
            f"from now on, every {operation} meets: {fault}"
            + (f", except the first {after}" if after else "")
        )
        self.harness.inject(operation, fault, after=after)
        self.disturbed = True
        try:
            yield
        finally:
            self.disturbed = False
            self.harness.clear()
            self.note("the backend is well again")

    def close(self) -> None:
        """End all that is alive, and release the world."""
        try:
            self.harness.clear()
            with contextlib.suppress(BackendError):
                self._end()
            self.harness.settle()
            if not self.hung:
                self.within("C8", self.executor.close)
        finally:
            self.harness.time.end()
            self.harness.close()

    def _end(self) -> None:
        for replica in self.replicas():
            if self.hung:
                return  # the next call would not come back either
            with contextlib.suppress(ReplicaNotFoundError):
                self.within("C1", lambda one=replica: self.executor.cancel(one.handle))  # type: ignore[misc]
