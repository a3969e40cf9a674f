"""The other details of a replica, its times, and what is declared of both: S10 to S14, D2."""

from __future__ import annotations

from types import EllipsisType

import pytest

from diloco_protocol import InvalidRequestError

from ._check_collect import collect
from ._harness import Ability, Harness, Step
from ._lab import Lab
from ._suite_states import ended


def needs_patience(lab: Lab) -> None:
    """Skip the test where a replica runs as soon as it is launched, and cannot be made to wait."""
    lab.needs(Ability.TIMEOUT)
    if lab.harness.starts_by_itself:
        pytest.skip("here replicas start by themselves, so that the suite cannot make them wait")


class Details:
    """Fixed tests of S10 to S14."""

    def test_s10_reasons_belong_to_states(self, lab: Lab) -> None:
        """Check reasons before the start, during the run, while it is being ended, and after."""
        run = lab.launch(2)
        lab.observe_all()
        for replica in run.replicas:
            lab.drive(replica, Step.START)
        lab.observe_all()
        lab.cancel(run.replicas[0])
        lab.observe_all()
        lab.settle()
        lab.observe_all()
        ended(lab)
        lab.observe_all()
        if lab.can(Step.PREEMPT):
            again = lab.up().replicas[0]
            lab.drive(again, Step.PREEMPT)
            lab.observe(again)

    def test_s11_signals_have_their_names_and_numbers(self, lab: Lab) -> None:
        """Check describe and collect, here and in another process."""
        lab.needs(Step.KILL)
        for name in ("SIGABRT", "SIGKILL", "SIGSEGV"):
            replica = lab.up().replicas[0]
            lab.drive(replica, Step.KILL, name)
            lab.observe(replica)
        collect(lab, lab.replicas())
        lab.forget()
        lab.observe_all()

    def test_s11_out_of_memory_is_a_signal(self, lab: Lab) -> None:
        """Check that the signal is SIGKILL, which the kernel sends, and the exit code 137."""
        lab.needs(Step.OOM)
        replica = lab.up().replicas[0]
        lab.drive(replica, Step.OOM)
        lab.observe(replica)
        collect(lab, [replica])

    def test_s12_times_are_those_of_the_attempt(self, lab: Lab) -> None:
        """Expect no times before, Unix seconds after, and a start that is before the end."""
        run = lab.launch(3)
        lab.observe_all()
        lab.advance(3 * lab.unit)
        for replica in run.replicas:
            lab.drive(replica, Step.START)
        lab.observe_all()
        lab.advance(3 * lab.unit)
        lab.observe_all()
        lab.drive(run.replicas[0], Step.SUCCEED)
        lab.observe_all()
        lab.cancel(run.replicas[1])
        lab.advance(3 * lab.unit)
        lab.settle()
        lab.observe_all()
        lab.forget()
        lab.observe_all()

    def test_s12_the_next_attempt_has_its_own_start(self, lab: Lab) -> None:
        """Check also that the attempt has no start while it is pending."""
        lab.needs(Step.PREEMPT)
        replica = lab.up().replicas[0]
        lab.observe(replica)
        lab.advance(3 * lab.unit)
        lab.drive(replica, Step.PREEMPT)
        lab.observe(replica)
        lab.advance(3 * lab.unit)
        lab.drive(replica, Step.START)
        lab.observe(replica)
        lab.drive(replica, Step.FAIL, 3)
        lab.observe(replica)

    def test_s13_waiting_uses_up_no_timeout(self, lab: Lab) -> None:
        """Check that after pending for longer than its timeout, a replica has all of it left."""
        needs_patience(lab)
        replica = lab.launch(1, timeout=lab.harness.short_timeout).replicas[0]
        lab.advance(2 * lab.harness.short_timeout + lab.harness.overrun)
        lab.settle()
        lab.observe(replica)
        lab.drive(replica, Step.START)
        lab.advance(lab.harness.short_timeout * 2 / 3)
        lab.observe(replica)
        lab.drive(replica, Step.SUCCEED, "in time")
        collect(lab, [replica])

    def test_s9_a_timeout_has_the_declared_scope(self, lab: Lab) -> None:
        """Check that siblings that have not started yet go on waiting, or end and say why."""
        needs_patience(lab)
        run = lab.launch(3, timeout=lab.harness.short_timeout)
        lab.drive(run.replicas[1], Step.START)
        lab.overrun(run)
        lab.observe_all()
        ended = [replica for replica in run.replicas if not replica.live]
        collect(lab, ended)

    def test_s13_no_time_is_taken_from_it(self, lab: Lab) -> None:
        """Check that the timeout is as long as the launch says, not whole minutes or seconds."""
        lab.needs(Ability.TIMEOUT)
        short = lab.harness.short_timeout
        cases = [(1.5 * short, 1.3 * short)]
        if type(lab.harness).sleep is Harness.sleep:
            cases.append((short + 0.9, short + 0.5))
        for timeout, passed in cases:
            run = lab.up(1, timeout=timeout)
            lab.advance(passed)
            truth = lab.harness.truth(run.handles[0])
            if truth.state is None or truth.state.terminal:
                lab.broken(
                    "S13", f"timeout={timeout:g}", f"after {passed:g} s it has ended: {truth}"
                )
            lab.observe_all()
            lab.overrun(run)
            lab.observe_all()

    def test_s13_each_attempt_has_the_whole_timeout(self, lab: Lab) -> None:
        """Check also that the second attempt is ended when its timeout is over."""
        needs_patience(lab)
        lab.needs(Step.PREEMPT)
        run = lab.up(1, timeout=lab.harness.short_timeout)
        for _ in range(2):
            lab.advance(lab.harness.short_timeout * 2 / 3)
            lab.observe_all()
            lab.drive(run.replicas[0], Step.PREEMPT)
            lab.drive(run.replicas[0], Step.START)
        lab.advance(lab.harness.short_timeout * 2 / 3)
        lab.settle()
        lab.observe_all()
        lab.overrun(run)
        lab.observe_all()

    def test_s13_without_a_timeout_it_runs_on(self, lab: Lab) -> None:
        """Let a replica without a timeout run for a long time."""
        lab.needs(Ability.TIMEOUT)
        try:
            lab.within(
                "S13", lambda: lab.executor.plan(1, lab.harness.entrypoint, {}, timeout=None)
            )
        except InvalidRequestError:
            if lab.capabilities.max_timeout is None:
                lab.broken("S13", "timeout=None was refused", "it declares no max_timeout")
            return  # refusing is right where there is a longest timeout
        replica = lab.up(1, timeout=None).replicas[0]
        if lab.can(Ability.AGE):
            lab.age(14 * 86_400.0)
        lab.advance(lab.harness.short_timeout + lab.harness.overrun)
        lab.settle()
        lab.observe(replica)
        lab.drive(replica, Step.SUCCEED, "at last")
        collect(lab, [replica])

    def test_s13_replicas_are_told_their_timeout(self, lab: Lab) -> None:
        """Check that replicas know their timeout, which the runner enforces."""
        lab.needs(Ability.TOLD)
        for timeout in (lab.harness.timeout, lab.harness.timeout + 0.5):
            run = lab.up(2, timeout=timeout)
            for replica in run.replicas:
                limit = lab.harness.told(replica.handle).timeout
                if isinstance(limit, EllipsisType):
                    pytest.skip("the harness's told() leaves the timeout out")
                if limit != timeout:
                    lab.broken("S13", f"{replica} is told {limit}", f"its timeout is {timeout}")

    def test_s14_records_are_kept_as_long_as_declared(self, lab: Lab) -> None:
        """Check states, results and runs; when they are gone, nothing may be invented."""
        lab.needs(Ability.AGE)
        replicas = ended(lab)
        lab.observe_all()
        kept = lab.capabilities.retention
        lab.age(400 * 86_400.0 if kept is None else 0.9 * kept)
        for replica in replicas:
            if lab.harness.truth(replica.handle).state is None:
                lab.broken("S14", f"it declares retention={kept}", f"{replica} is forgotten")
        lab.forget()
        self._kept(lab)
        lab.observe_all()
        collect(lab, replicas)
        for replica in replicas:
            lab.attach(replica.run)
        lab.age(0.3 * (kept or 0.0))
        for replica in replicas:
            replica.gone = lab.harness.truth(replica.handle).state is None
        lab.observe_all()
        collect(lab, replicas)

    def _kept(self, lab: Lab) -> None:
        for replica in lab.replicas():
            try:
                lab.within("S14", lambda one=replica: lab.executor.describe(one.handle))  # type: ignore[misc]
            except LookupError as error:
                lab.broken("S14", f"describe({replica}) raised {error!r}", "its record is kept")
