"""Ending replicas: C1 to C6."""

from __future__ import annotations

from diloco_protocol import ReplicaState

from ._check_collect import collect
from ._harness import Ability, Fault, Harness, Operation, Step
from ._lab import Lab
from ._logs import check_log
from ._scenes import broken_cancel, early_purge
from ._suite_states import ended


class Cancelling:
    """Fixed tests of C1 to C6."""

    def test_c1_cancelling_twice_is_cancelling_once(self, lab: Lab) -> None:
        """Cancel before, while and after a cancel takes effect, and from another process."""
        run = lab.up(2)
        for _ in range(3):
            lab.cancel(run.replicas[0])
            lab.observe_all()
        lab.forget()
        lab.cancel(run.replicas[0])
        lab.settle()
        lab.observe_all()
        lab.cancel(run.replicas[0])
        lab.settle()
        lab.observe_all()

    def test_c1_cancelling_what_is_gone_is_no_error(self, lab: Lab) -> None:
        """Cancel a replica whose run was purged, or forgotten by the backend."""
        run = lab.up()
        lab.drive(run.replicas[0], Step.SUCCEED)
        lab.purge(run)
        lab.cancel(run.replicas[0])
        if lab.can(Ability.EXPIRE):
            run = lab.up()
            lab.drive(run.replicas[0], Step.FAIL, 1)
            lab.expire(run)
            lab.cancel(run.replicas[0])
            lab.forget()
            lab.cancel(run.replicas[0])

    def test_c2_cancel_changes_nothing_that_has_ended(self, lab: Lab) -> None:
        """Check that every end stays what it is."""
        replicas = ended(lab)
        lab.observe_all()
        for replica in replicas:
            lab.cancel(replica)
        lab.observe_all()
        lab.settle()
        lab.observe_all()
        lab.forget()
        lab.observe_all()

    def test_c3_cancel_has_the_declared_scope(self, lab: Lab) -> None:
        """Check that siblings go on or end, as declared.

        Other runs are never touched, and replicas that have ended stay as they are.
        """
        run, beside = lab.up(4), lab.up(2)
        lab.drive(run.replicas[0], Step.SUCCEED, "first")
        lab.observe_all()
        lab.cancel(run.replicas[1])
        lab.observe_all()
        lab.settle()
        lab.observe_all()
        lab.drive(beside.replicas[0], Step.SUCCEED, "untouched")
        lab.observe_all()
        if lab.capabilities.cancel_scope == "replica":
            lab.drive(run.replicas[3], Step.SUCCEED, "untouched, too")
            lab.observe_all()

    def test_c3_another_process_can_cancel(self, lab: Lab) -> None:
        """Check that a handle is enough to cancel."""
        one, two = lab.up(1), lab.up(1)
        lab.forget()
        lab.cancel(one.replicas[0])
        lab.settle()
        lab.observe_all()
        lab.drive(two.replicas[0], Step.SUCCEED, 2)
        lab.observe_all()

    def test_c4_a_cancel_that_is_not_accepted_raises(self, lab: Lab) -> None:
        """Check that nothing has changed after the error, and that cancelling later works."""
        lab.needs(Operation.CANCEL)
        replica = lab.up(2).replicas[1]
        for fault in lab.faults(
            Fault.FORBIDDEN,
            Fault.CONFLICT,
            Fault.SERVER_ERROR,
            Fault.REFUSED,
            Fault.THROTTLE,
        ):
            broken_cancel(lab, replica, fault)
            lab.observe_all()
        lab.cancel(replica)
        lab.settle()
        lab.observe_all()

    def test_c5_what_is_cancelled_ends(self, lab: Lab) -> None:
        """Cancel all replicas of a run, one by one; collect must say that they are cancelled."""
        run = lab.up(3)
        for replica in run.replicas:
            lab.cancel(replica)
        lab.observe_all()
        lab.settle()
        lab.observe_all()
        results = collect(lab, run.replicas)
        if {entry["status"] for entry in results} != {ReplicaState.CANCELLED}:
            lab.broken("C5", str(results), "all were cancelled")

    def test_c5_an_end_that_won_the_race_stays(self, lab: Lab) -> None:
        """Let a replica end by itself after its cancel was accepted, before it took effect."""
        lab.needs(Ability.RACE)
        for step, value in ((Step.SUCCEED, "won"), (Step.FAIL, 9)):
            replica = lab.up().replicas[0]
            lab.cancel(replica)
            lab.drive(replica, step, value)
            lab.observe(replica)
            lab.settle()
            lab.observe(replica)
            collect(lab, [replica])

    def test_c5_a_preemption_does_not_undo_a_cancel(self, lab: Lab) -> None:
        """Take away a replica's machine before its cancel takes effect: it must not restart."""
        lab.needs(Ability.RACE, Step.PREEMPT)
        run = lab.up(2)
        lab.cancel(run.replicas[0])
        lab.drive(run.replicas[0], Step.PREEMPT)
        lab.observe_all()
        lab.settle()
        lab.observe_all()
        collect(lab, run.replicas[:1])

    def test_c6_cancel_keeps_the_evidence(self, lab: Lab) -> None:
        """Check that the log and the record in list_runs are still there."""
        run = lab.up()
        if lab.can(Step.PRINT):
            lab.drive(run.replicas[0], Step.PRINT, ["evidence"])
        lab.cancel(run.replicas[0])
        lab.settle()
        lab.forget()
        lab.observe_all()
        lab.attach(run)
        if lab.can(Step.PRINT):
            check_log(lab, run.replicas[0])

    def test_c6_purge_is_refused_while_something_lives(self, lab: Lab) -> None:
        """Purge too early, and again when all has ended, repeatedly; other runs must stay."""
        run, beside = lab.up(2), lab.up(1)
        lab.drive(run.replicas[0], Step.SUCCEED)
        for by in (0, 1):
            early_purge(lab, run, by)
        lab.observe_all()
        lab.cancel(run.replicas[1])
        if lab.harness.truth(run.handles[1]).alive and type(lab.harness).sleep is Harness.sleep:
            early_purge(lab, run)  # its end is under way, but not over
            lab.observe_all()
        lab.settle()
        lab.purge(run)
        lab.purge(run)
        lab.observe_all()
        if run.run_id in lab.verb("C6", lab.executor.list_runs):
            lab.broken("C6", f"list_runs has {run.run_id!r}", "it was purged")
        lab.attach(beside)

    def test_c6_every_handle_purges_its_whole_run(self, lab: Lab) -> None:
        """Purge by the first handle, by one in the middle, and by the last."""
        for by in (0, 1, 2):
            run = lab.up(3)
            for replica in run.replicas:
                lab.drive(replica, Step.SUCCEED)
            lab.purge(run, look=True, by=by)
        lab.observe_all()
