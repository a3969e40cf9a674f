"""The rule that whatever happens is declared: D2.

The tests of all other promises check that what is declared happens.
"""

from __future__ import annotations

import pytest

from diloco_protocol import ReplicaState

from ._harness import Ability, Step
from ._lab import Lab
from ._suite_collect import calls_of_a_look
from ._suite_states import ended


class Declaring:
    """Fixed tests of D2."""

    def test_d2_nobody_is_preempted_who_cannot_be(self, lab: Lab) -> None:
        """Check that a backend whose replicas restart after losing their machine declares it."""
        if lab.capabilities.preemptible:
            pytest.skip("only for backends that declare preemptible=False")
        if Step.PREEMPT in lab.harness.cannot:
            pytest.skip(lab.harness.cannot[Step.PREEMPT])
        replica = lab.up().replicas[0]
        lab.note(f"{replica} is made to {Step.PREEMPT}", "drive")
        lab.harness.drive(replica.handle, Step.PREEMPT)
        truth = lab.harness.truth(replica.handle)
        if truth.attempt != 1 or truth.state is ReplicaState.PENDING:
            lab.broken("D2", "the backend declares preemptible=False", f"{replica} is {truth}")

    def test_d2_attempts_are_counted_only_where_declared(self, lab: Lab) -> None:
        """Check that a backend that cannot tell attempts apart always says 1."""
        lab.needs(Step.PREEMPT)
        replica = lab.up().replicas[0]
        for _ in range(2):
            lab.drive(replica, Step.PREEMPT)
            lab.drive(replica, Step.START)
            lab.observe(replica)
        lab.drive(replica, Step.SUCCEED, 1)
        lab.observe(replica)

    def test_d2_who_tells_pending_from_running_declares_it(self, lab: Lab) -> None:
        """Check that a backend that can tell pending from running says so: callers rely on it."""
        if lab.capabilities.distinguishes_pending:
            pytest.skip(
                "only for backends that declare distinguishes_pending=False; S4 tests the others"
            )
        if lab.harness.starts_by_itself:
            pytest.skip("here replicas start by themselves, so that none is seen to be pending")
        run = lab.launch(2)
        lab.drive(run.replicas[1], Step.START)
        statuses = [lab.observe(replica) for replica in run.replicas]
        states = [None if one is None else one.state for one in statuses]
        if states == [ReplicaState.PENDING, ReplicaState.RUNNING]:
            lab.broken(
                "D2",
                "the backend declares distinguishes_pending=False",
                f"it says {' and '.join(map(str, states))} of two replicas of which this is true",
            )

    def test_d2_who_looks_at_a_run_at_once_declares_it(self, lab: Lab) -> None:
        """Check that ``calls_per_look="rank"`` is declared only if each rank must be asked for."""
        lab.needs(Ability.CALLS)
        if lab.capabilities.calls_per_look == "run":
            pytest.skip(
                'only for backends that declare calls_per_look="rank"; R8 counts the '
                "calls of others"
            )
        few, many = calls_of_a_look(lab)
        if many < few + 10:
            lab.broken(
                "D2",
                'the backend declares calls_per_look="rank"',
                f"a look at 2 ranks took {few} calls, and a look at 12 ranks {many}",
            )

    def test_d2_what_is_kept_for_longer_is_declared(self, lab: Lab) -> None:
        """Check that records are not kept for much longer than the declared retention."""
        lab.needs(Ability.AGE)
        kept = lab.capabilities.retention
        if kept is None:
            pytest.skip(
                "only for backends that declare a retention: here records stay until purge()"
            )
        replicas = ended(lab)
        lab.age(1.5 * kept)
        lab.harness.settle()
        for replica in replicas:
            if (truth := lab.harness.truth(replica.handle)).state is not None:
                lab.broken("D2", f"it declares retention={kept:g}", f"{replica} is still {truth}")
            replica.gone = True
        lab.observe_all()
