"""The cost of a failure to its author: shortening takes no minutes, virtual time no waiting."""

import threading
from dataclasses import replace

import pytest
from test_toy import ToyHarness
from toy_executor import ToyExecutor
from wrong_all import MUTANTS, harness_of

from diloco_conformance import ExecutorConformance, Fault, Harness, PromiseBroken, Step
from diloco_conformance._check_collect import collect
from diloco_conformance._lab import Lab
from diloco_conformance._run_machine import TRIES, run_machine
from diloco_conformance._scenes import broken_look
from diloco_protocol import Reason, ReplicaState, ReplicaStatus, UnavailableError


def tried(make_harness):
    """How many worlds the state machine has made, and what it has found."""
    worlds = []

    def make():
        worlds.append(make_harness())
        return worlds[-1]

    with pytest.raises(PromiseBroken) as caught:
        run_machine(make, examples=40, steps=30, shrink=True)
    return len(worlds), caught.value


@pytest.mark.slow
def test_a_sequence_is_made_shorter_within_bounds():
    number, error = tried(harness_of(MUTANTS["CancelOverwritesTerminal"].cls, gang=False))
    assert number <= 40 + 1 + TRIES
    assert str(error).startswith("C2")


@pytest.mark.slow
def test_the_shortest_one_is_shown():
    make_harness = harness_of(MUTANTS["CancelledTooEarly"].cls, gang=False)
    with pytest.raises(PromiseBroken) as caught:
        run_machine(make_harness, examples=40, steps=30, shrink=False)
    _, error = tried(make_harness)
    assert len(str(error).splitlines()) < len(str(caught.value).splitlines())


def test_a_sequence_that_hangs_is_tried_once():
    over, hung = threading.Event(), set()

    class Hangs(ToyExecutor):
        def _stop(self, handle):
            hung.add(self.cloud)
            over.wait()

    class Mine(harness_of(Hangs, gang=False)):
        patience = 2.0

    try:
        _, error = tried(Mine)
    finally:
        over.set()
    assert "nothing, for 2 s" in str(error)
    assert len(hung) == 1


def test_who_waits_without_end_is_not_waited_for_where_time_is_virtual():
    class Waits(ToyExecutor):
        def _stop(self, handle):
            while True:
                self._backoff.sleep(5.0)

    class Mine(harness_of(Waits, gang=False)):
        patience = 600.0

    lab = Lab(Mine())
    run = lab.up()
    with pytest.raises(PromiseBroken, match="still asleep") as caught:
        lab.cancel(run.replicas[0])
    assert caught.value.promise == "C1"
    assert lab.harness.time.limit is None


def test_patience_is_short_where_time_is_virtual_and_the_author_s_where_he_says():
    class Real(ToyHarness):
        def sleep(self, seconds):
            pass

    class Mine(ToyHarness):
        patience = 7.0

    assert [cls().patience for cls in (ToyHarness, Real, Mine)] == [5.0, 30.0, 7.0]
    assert not hasattr(Harness, "patience")


@pytest.mark.parametrize(
    ("name", "expected", "seen", "where"),
    [
        (
            "CancelRunOfNothing",
            "there is no such run",
            "cancel_run('never-was') returned",
            "_attach",
        ),
        (
            "LogsByPrefix",
            "the replica wrote 2 lines",
            "stream_logs(rank 0 of run 2",
            "was written by rank",
        ),
        (
            "VariablesDoNotCount",
            "must be refused with RunConflictError",
            "launch_replicas(",
            "request.",
        ),
    ],
)
def test_a_message_says_what_was_expected_what_was_seen_and_where_to_look(
    name, expected, seen, where
):
    mutant = MUTANTS[name]
    make_harness = harness_of(mutant.cls, gang=mutant.gang)
    with pytest.raises(PromiseBroken) as caught:
        getattr(ExecutorConformance(), mutant.test)(Lab(make_harness()))
    said, true = caught.value.said, caught.value.true
    assert seen in said
    assert expected in true
    assert where in true


def test_a_call_that_does_not_come_back_is_ended_so_that_it_takes_no_time_from_others():
    class Spins(ToyExecutor):
        def _observe_run(self, handles):
            spinning.append(threading.current_thread())
            while True:
                pass

    class Mine(harness_of(Spins, gang=False)):
        patience = 2.0

    spinning = []
    lab = Lab(Mine())
    lab.launch()
    with pytest.raises(PromiseBroken, match="nothing, for"):
        lab.observe_all()
    spinning[0].join(timeout=300)
    assert not spinning[0].is_alive()


class NoExitCode(ToyExecutor):
    def _status(self, job):
        return replace(super()._status(job), exit_code=None)


@pytest.mark.parametrize(
    ("step", "look", "shown"),
    [
        (Step.SUCCEED, Lab.observe_all, "no exit code"),
        (Step.FAIL, lambda lab: collect(lab, lab.replicas()), "exit_code=None"),
    ],
    ids=["describe", "collect"],
)
def test_a_message_shows_what_is_missing(step, look, shown):
    lab = Lab(harness_of(NoExitCode, gang=False)())
    lab.drive(lab.up().replicas[0], step, 3)
    with pytest.raises(PromiseBroken) as caught:
        look(lab)
    assert caught.value.promise == "R4"
    assert shown in caught.value.said


@pytest.mark.parametrize("look", [Lab.poll_all, Lab.observe_all], ids=["poll", "describe"])
def test_an_end_that_was_seen_may_be_said_while_the_backend_is_away(look):
    class RemembersEnds(ToyExecutor):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.ends = {}

        def _observe_run(self, handles):
            if not all(handle in self.ends for handle in handles):
                found = super()._observe_run(handles)
                self.ends.update(
                    {each: found[each] for each in found if found[each].state.terminal}
                )
                return found
            return {handle: self.ends[handle] for handle in handles}

    lab = Lab(harness_of(RemembersEnds, gang=False)())
    (replica, *_) = lab.up(1).replicas
    lab.drive(replica, Step.SUCCEED)
    look(lab)
    broken_look(lab, replica, Fault.SERVER_ERROR)


def test_an_end_that_nobody_has_told_may_not():
    class Guesses(ToyExecutor):
        def describe(self, handle):
            try:
                return super().describe(handle)
            except UnavailableError:
                return ReplicaStatus(ReplicaState.SUCCEEDED, 1, Reason.COMPLETED, exit_code=0)

    lab = Lab(harness_of(Guesses, gang=False)())
    (replica, *_) = lab.up(1).replicas
    lab.drive(replica, Step.SUCCEED)
    with pytest.raises(PromiseBroken, match="could not be asked"):
        broken_look(lab, replica, Fault.SERVER_ERROR)


def test_a_cancel_may_read_and_then_write():
    class Reads(ToyExecutor):
        def _stop(self, handle):
            self._jobs(handle.run_id)
            super()._stop(handle)

    lab = Lab(harness_of(Reads, gang=False)())
    ExecutorConformance().test_c7_where_the_scope_is_the_run_one_call_is_enough(lab)


def test_an_executor_that_cannot_be_closed_twice_breaks_that_promise_and_no_other():
    class Once(ToyExecutor):
        def close(self):
            self.cloud.calls  # noqa: B018 - it raises, once the cloud is gone
            self.cloud = None

    lab = Lab(harness_of(Once, gang=False)())
    with pytest.raises(PromiseBroken) as caught:
        ExecutorConformance().test_c8_close_ends_nothing(lab)
    assert caught.value.promise == "C8"
    lab.close()


@pytest.mark.parametrize("error", [KeyError("late"), UnavailableError("late")])
def test_what_a_harness_raises_at_the_end_of_a_test_is_shown(error):
    class Late(ToyHarness):
        def settle(self):
            raise error

    with pytest.raises(type(error), match="late"):
        Lab(Late()).close()


def test_a_stream_that_nobody_knows_is_named():
    mutant = MUTANTS["DeclaresAStreamOfItsOwn"]
    lab = Lab(harness_of(mutant.cls, gang=False)())
    with pytest.raises(PromiseBroken, match="'syslog' is none of the streams"):
        ExecutorConformance().test_g4_the_streams_are_kept_apart(lab)


class Remembering(ToyExecutor):
    """Goes on answering the ends that it has seen, whatever becomes of their records."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.ends = {}

    def _observe_run(self, handles):
        known = {handle: self.ends[handle] for handle in handles if handle in self.ends}
        asked = [handle for handle in handles if handle not in known]
        seen = dict(super()._observe_run(asked)) if asked else {}
        self.ends.update({h: status for h, status in seen.items() if status.state.terminal})
        return {**known, **seen}


@pytest.mark.parametrize("verb", ["poll", "describe", "collect"])
def test_who_has_told_an_end_may_remember_it(verb):
    """By whatever verb it was told; before anything was told, it is an answer without a record."""
    lab = Lab(harness_of(Remembering, gang=False)())
    run = lab.up(1)
    (replica,) = run.replicas
    lab.drive(replica, Step.FAIL, 3)
    {
        "poll": lab.poll_all,
        "describe": lab.observe_all,
        "collect": lambda: collect(lab, [replica]),
    }[verb]()
    lab.expire(run)
    lab.poll_all()
    lab.observe_all()
    collect(lab, [replica])


def test_who_has_not_told_an_end_may_not():
    lab = Lab(harness_of(Remembering, gang=False)())
    run = lab.up(1)
    lab.drive(run.replicas[0], Step.FAIL, 3)
    lab.poll_all()
    lab.expire(run)
    run.replicas[0].nobody_knows()
    with pytest.raises(PromiseBroken, match="S6 is broken"):
        lab.poll_all()


def test_of_a_plan_that_is_not_sent_only_the_first_difference_is_shown():
    lab = Lab(harness_of(MUTANTS["PlanIsSomethingElse"].cls, gang=False)())
    with pytest.raises(PromiseBroken) as caught:
        ExecutorConformance().test_l5_a_plan_is_what_is_sent(lab)
    lab.close()
    assert "planned[0]['restarts']: 7" in str(caught.value)
    assert "sent[0]['restarts']: 0" in str(caught.value)
    assert "arguments" not in str(caught.value)
