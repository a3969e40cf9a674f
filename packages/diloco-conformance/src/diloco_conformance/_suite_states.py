"""The state that is reported of a replica: S1 to S9; :mod:`_suite_details` has the rest."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from diloco_protocol import BackendError, Reason, ReplicaNotFoundError, ReplicaState

from ._check_collect import collect
from ._harness import Ability, Fault, Operation, Step
from ._lab import Lab
from ._model import Replica
from ._refusals import must_raise
from ._scenes import RETRYABLE, broken_look


def ended(lab: Lab) -> list[Replica]:
    """Return one replica for each end that can be had here, each in a run of its own."""
    replicas = []
    for step, value in ((Step.SUCCEED, {"x": [1]}), (Step.FAIL, 3), (Step.OOM, None)):
        if lab.can(step):
            replicas.append(lab.up().replicas[0])
            lab.drive(replicas[-1], step, value)
    replicas.append(lab.up().replicas[0])
    lab.cancel(replicas[-1])
    lab.settle()
    if lab.can(Ability.TIMEOUT):
        replicas.append(lab.up(timeout=lab.harness.short_timeout).replicas[0])
        lab.overrun(replicas[-1].run)
    return replicas


class States:
    """Fixed tests of S1 to S9."""

    def test_s1_states_are_the_five_and_poll_agrees_with_describe(self, lab: Lab) -> None:
        """Check this through the whole life of a replica."""
        run = lab.launch(2)
        lab.agree()
        for replica in run.replicas:
            lab.drive(replica, Step.START)
        lab.agree()
        ended(lab)
        lab.agree()

    def test_s4_poll_is_true_by_itself(self, lab: Lab) -> None:
        """Poll without a describe before it, twice in a row, from one state to the next."""
        run = lab.launch(3)
        lab.poll_all()
        for replica in run.replicas:
            lab.drive(replica, Step.START)
            lab.poll_all()
        lab.drive(run.replicas[0], Step.SUCCEED, 1)
        lab.poll_all()
        lab.cancel(run.replicas[1])
        lab.poll_all()
        lab.settle()
        lab.poll_all()
        beside = lab.up(2)
        lab.drive(beside.replicas[1], Step.FAIL, 2)
        lab.poll_all()
        lab.settle()
        lab.forget()
        lab.poll_all()

    def test_s4_poll_and_describe_are_one(self, lab: Lab) -> None:
        """Ask both, in either order."""
        run = lab.launch(2)
        for replica in run.replicas:
            lab.agree()
            lab.drive(replica, Step.START)
        lab.agree()
        lab.drive(run.replicas[0], Step.SUCCEED, 1)
        lab.agree()
        lab.cancel(run.replicas[1])
        lab.agree()
        lab.settle()
        lab.agree()

    def test_s2_terminal_states_are_never_left(self, lab: Lab) -> None:
        """Check this whatever is asked or done afterwards."""
        replicas = ended(lab)
        for replica in replicas:
            lab.observe_all()
            collect(lab, [replica])
            lab.observe_all()
            lab.cancel(replica)
            lab.observe_all()
        lab.settle()
        lab.forget()
        lab.observe_all()
        collect(lab, replicas)
        lab.observe_all()

    def test_s3_states_go_forward(self, lab: Lab) -> None:
        """Go from pending to running, to being cancelled, and to cancelled."""
        run = lab.launch()
        replica = run.replicas[0]
        lab.observe(replica)
        lab.drive(replica, Step.START)
        for _ in range(3):
            lab.observe(replica)
        lab.cancel(replica)
        for _ in range(3):
            lab.observe(replica)
        lab.settle()
        lab.observe(replica)

    def test_s3_a_preempted_replica_is_pending_with_the_next_attempt(self, lab: Lab) -> None:
        """Check that the replica runs again, and can end like any other."""
        lab.needs(Step.PREEMPT)
        run = lab.up(2)
        lab.observe_all()
        for _ in range(2):
            lab.drive(run.replicas[0], Step.PREEMPT)
            lab.observe_all()
            lab.drive(run.replicas[0], Step.START)
            lab.observe_all()
        lab.drive(run.replicas[0], Step.SUCCEED, 1)
        lab.observe_all()

    def test_s4_every_rank_for_itself(self, lab: Lab) -> None:
        """Tell apart one pending, one running, one succeeded and one failed replica."""
        run = lab.launch(4)
        lab.observe_all()
        for replica in run.replicas[1:]:
            lab.drive(replica, Step.START)
            lab.observe_all()
        lab.drive(run.replicas[2], Step.SUCCEED, "done")
        lab.observe_all()
        lab.drive(run.replicas[3], Step.FAIL, 1)
        lab.observe_all()
        lab.settle()
        lab.observe_all()

    def test_s4_every_run_for_itself(self, lab: Lab) -> None:
        """Check that a later run changes no answer about an earlier one."""
        one, two = lab.up(2), lab.launch(2)
        lab.observe_all()
        lab.drive(one.replicas[0], Step.SUCCEED, "one")
        lab.observe_all()
        for replica in two.replicas:
            lab.drive(replica, Step.START)
        lab.cancel(two.replicas[0])
        lab.settle()
        lab.observe_all()
        collect(lab, [*two.replicas, *one.replicas])

    def test_s5_cancelled_only_when_the_resources_are_gone(self, lab: Lab) -> None:
        """Ask right after the cancel, from this process and from another."""
        run = lab.up(2)
        lab.cancel(run.replicas[0])
        lab.observe_all()
        collect(lab, run.replicas)
        lab.forget()
        lab.observe_all()
        lab.settle()
        lab.observe_all()

    def test_s5_what_never_started_can_be_cancelled(self, lab: Lab) -> None:
        """Check that a replica that never started ends as cancelled, too."""
        run = lab.launch(2)
        lab.cancel(run.replicas[1])
        lab.observe_all()
        lab.settle()
        lab.observe_all()

    def test_s6_no_record_is_an_exception(self, lab: Lab) -> None:
        """Ask after a purge, and for a run that never was."""
        run = lab.up()
        lab.drive(run.replicas[0], Step.SUCCEED)
        lab.purge(run)
        lab.forget()
        run.replicas[0].nobody_knows()
        lab.observe_all()
        attach = partial(lab.executor.attach, "never-was")
        must_raise(lab, "S6", "attach", attach, ReplicaNotFoundError, "there is no run 'never-was'")

    def test_s6_what_the_backend_forgot_is_an_exception(self, lab: Lab) -> None:
        """Check that an expired record is neither a cancelled replica nor a success."""
        lab.needs(Ability.EXPIRE)
        for replica in ended(lab):
            lab.expire(replica.run)
        lab.observe_all()
        lab.forget()
        for replica in lab.replicas():
            replica.nobody_knows()
        lab.observe_all()

    def test_s6_a_backend_that_cannot_be_asked_is_an_exception(self, lab: Lab) -> None:
        """Try every fault in every state."""
        lab.needs(Operation.OBSERVE)
        run = lab.launch(2)
        lab.drive(run.replicas[1], Step.START)
        for fault in lab.faults(*RETRYABLE, Fault.FORBIDDEN):
            for replica in run.replicas:
                broken_look(lab, replica, fault)
        lab.observe_all()

    def test_s6_what_was_true_before_is_no_answer(self, lab: Lab) -> None:
        """End the replica while the backend cannot be asked: it must not be called running."""
        lab.needs(Operation.OBSERVE)
        for fault in lab.faults(*RETRYABLE, Fault.FORBIDDEN):
            replica = lab.up().replicas[0]
            lab.observe(replica)
            lab.poll(replica)
            with lab.fault(Operation.OBSERVE, fault):
                lab.drive(replica, Step.SUCCEED, "meanwhile")
                for name, call in (
                    ("poll", lambda one=replica.handle: lab.executor.poll(one)),
                    ("describe", lambda one=replica.handle: lab.executor.describe(one).state),
                ):
                    lab.note(f"{name}({replica})")
                    with suppress(BackendError):
                        if (state := lab.within("S6", call)) is not ReplicaState.SUCCEEDED:
                            lab.broken(
                                "S6",
                                f"{name} said {state}",
                                f"{fault}: the executor cannot know, and {replica} has succeeded",
                            )
            lab.observe(replica)

    def test_s7_a_timeout_is_a_failure(self, lab: Lab) -> None:
        """Expect the reason timeout from describe and collect, here and in another process."""
        lab.needs(Ability.TIMEOUT)
        run = lab.up(2, timeout=lab.harness.short_timeout)
        beside = lab.up(1)
        lab.observe_all()
        lab.overrun(run)
        lab.observe_all()
        collect(lab, [*run.replicas, *beside.replicas])
        lab.forget()
        lab.observe_all()
        collect(lab, run.replicas)
        if run.replicas[0].reason is not Reason.TIMEOUT:
            lab.broken("S7", str(run.replicas[0].said), "it was past its timeout")

    def test_s8_exit_codes_and_reasons_are_the_true_ones(self, lab: Lab) -> None:
        """Check other exit codes than 0 and 1."""
        for code in (1, 2, 42, 255):
            replica = lab.up().replicas[0]
            lab.drive(replica, Step.FAIL, code)
            lab.observe(replica)
        ended(lab)
        lab.observe_all()

    def test_s9_a_failure_has_the_declared_scope(self, lab: Lab) -> None:
        """Check that the siblings go on, or end and say why."""
        run, beside = lab.up(3), lab.up(1)
        lab.drive(run.replicas[1], Step.FAIL, 7)
        lab.observe_all()
        lab.settle()
        lab.observe_all()
        collect(lab, [*run.replicas, *beside.replicas])
