"""Attempts that fail and are started again: L9."""

from __future__ import annotations

import pytest

from diloco_protocol import Reason

from ._check_collect import collect
from ._harness import Ability, Step
from ._lab import Lab
from ._suite_details import needs_patience
from ._suite_told import refused


def needs_restarts(lab: Lab) -> None:
    """Skip the test where the backend refuses restarts, or the world has none.

    The first test of L9 checks that they are refused.
    """
    lab.needs(Ability.RESTART)
    entrypoint, kwargs = lab.harness.entrypoint, lab.harness.entrypoint_args
    try:
        lab.within("L9", lambda: lab.executor.plan(1, entrypoint, kwargs, max_restarts=1))
    except ValueError:
        pytest.skip("the backend refuses restarts")


class Restarting:
    """Fixed tests of L9."""

    def test_l9_a_failed_attempt_is_started_again(self, lab: Lab) -> None:
        """Check that attempts restart as often as the launch says, or that it is refused."""
        entrypoint, kwargs = lab.harness.entrypoint, lab.harness.entrypoint_args
        try:
            lab.within("L9", lambda: lab.executor.plan(1, entrypoint, kwargs, max_restarts=2))
        except ValueError:
            refused(lab, "L9", max_restarts=2)
            return
        lab.needs(Ability.RESTART)
        replica = lab.up(1, max_restarts=2).replicas[0]
        for code in (3, 4):
            lab.drive(replica, Step.FAIL, code)
            lab.observe_all()
            lab.drive(replica, Step.START)
            lab.observe_all()
        lab.drive(replica, Step.FAIL, 5)
        lab.observe_all()
        other = lab.up(2, max_restarts=1).replicas[0]
        lab.drive(other, Step.FAIL, 3)
        lab.forget()
        lab.drive(other, Step.START)
        lab.drive(other, Step.SUCCEED, "in the end")
        collect(lab, [replica, other])

    def test_l9_every_failure_is_followed_by_the_next_attempt(self, lab: Lab) -> None:
        """Fail for want of memory, and by a signal, too; none of that is called a preemption."""
        needs_restarts(lab)
        for step, value in ((Step.FAIL, 3), (Step.OOM, None), (Step.KILL, "SIGABRT")):
            if not lab.can(step):
                continue
            replica = lab.up(1, max_restarts=1).replicas[0]
            lab.drive(replica, step, value)
            status = lab.verb("L9", lambda one=replica: lab.executor.describe(one.handle))  # type: ignore[misc]
            if status.reason is Reason.PREEMPTED:
                lab.broken("L9", f"describe({replica}) is {status}", f"it was made to {step}")
            lab.drive(replica, Step.START)
            lab.observe(replica)
            lab.drive(replica, Step.SUCCEED, "in the end")
            collect(lab, [replica])

    def test_l9_a_timeout_is_followed_by_the_next_attempt(self, lab: Lab) -> None:
        """Check that a timeout is a failure like any other; the last attempt ends with it."""
        needs_restarts(lab)
        needs_patience(lab)
        run, beside = lab.up(1, max_restarts=1, timeout=lab.harness.short_timeout), lab.up(1)
        lab.overrun_once(run.replicas[0])
        lab.observe_all()
        lab.drive(run.replicas[0], Step.START)
        lab.observe_all()
        lab.overrun(run)
        lab.observe_all()
        collect(lab, [*run.replicas, *beside.replicas])

    def test_l9_a_preemption_uses_up_no_restart(self, lab: Lab) -> None:
        """Preempt before a failure and after it, several times, and with no restarts at all."""
        needs_restarts(lab)
        lab.needs(Step.PREEMPT)
        for restarts, steps in (
            (0, (Step.PREEMPT, Step.PREEMPT)),
            (1, (Step.PREEMPT, Step.FAIL, Step.PREEMPT)),
        ):
            replica = lab.up(1, max_restarts=restarts).replicas[0]
            for step in steps:
                lab.drive(replica, step, 3 if step is Step.FAIL else None)
                lab.observe(replica)
                lab.drive(replica, Step.START)
            lab.drive(replica, Step.FAIL, 4)
            lab.observe(replica)
            collect(lab, [replica])
