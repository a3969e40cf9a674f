"""The base of all rules: choosing what to act on, and looking at everything after every step."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant

from diloco_protocol import BackendError, ReplicaState

from ._harness import Ability, Harness
from ._lab import Lab
from ._model import Replica, Run

MOST_RUNS = 9
MOST_LIVING = 6

pick = st.integers(0, 1000)
"""A choice: the number modulo how many candidates there are."""


class MachineBase(RuleBasedStateMachine):
    """A world, and the runs in it.

    Attributes:
        lab: World, executor and model: everything a rule does goes through it, is checked, and is
            written down.
    """

    def __init__(self, harness: Harness) -> None:
        super().__init__()
        self.lab = Lab(harness)
        self._looks = 0

    def teardown(self) -> None:
        """End an example."""
        self.lab.close()

    # --- choosing ---

    # A rule that finds nothing to act on does nothing: hypothesis.assume() would discard the whole
    # sequence.

    def some(self, number: int, test: Callable[[Replica], bool]) -> Replica | None:
        """Return one of the replicas that pass the test, if there is one."""
        candidates = [
            replica for replica in self.lab.replicas() if not replica.gone and test(replica)
        ]
        return candidates[number % len(candidates)] if candidates else None

    def some_run(self, number: int, *, ended: bool = False) -> Run | None:
        """Return one of the runs of which there are records, if there is one."""
        candidates = [
            run for run in self.lab.runs if not run.replicas[0].gone and not (ended and run.live)
        ]
        return candidates[number % len(candidates)] if candidates else None

    @property
    def room(self) -> bool:
        """Say whether there is room for one more run."""
        return (
            len(self.lab.runs) < MOST_RUNS
            and sum(one.live for one in self.lab.replicas()) < MOST_LIVING
        )

    def running(self, number: int, *, race: bool = False) -> Replica | None:
        """Return a replica that runs, a new one if need be.

        It is not being ended, unless ``race`` is true and the world can do that.
        """
        harness = self.lab.harness
        now = harness.clock()
        race = race and self.lab.can(Ability.RACE)

        def fits(one: Replica) -> bool:
            runs = one.state is ReplicaState.RUNNING and one.started_at is not None
            # In real time, a short timeout may come before the replica has done what it is told.
            short = one.run.timeout == harness.short_timeout
            late = one.overdue(now) or (harness.starts_by_itself and short)
            return runs and not one.doomed and not late and (race or not one.stopping)

        if self.room and not any(fits(one) for one in self.lab.replicas()):
            self.lab.up(1)
        return self.some(number, fits)

    # --- after every step ---

    @invariant()
    def the_truth_is_told(self) -> None:
        """Check that describe and poll tell the true state of every replica.

        They are asked in turn: describe alone, poll alone, and poll before describe.
        """
        self._looks += 1
        try:
            if self._looks % 3:
                self.lab.poll_all()
            if self._looks % 3 != 1:
                self.lab.observe_all()
        except BackendError as error:
            self.lab.broken(
                "S4",
                f"it raised {error!r}",
                "the backend is well and has records of every replica",
            )
