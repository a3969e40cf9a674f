"""What the suite refuses, skips and says."""

import inspect
import re
import secrets
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis.stateful import rule
from test_toy import ToyHarness
from toy_executor import ToyExecutor
from wrong import harness_of
from wrong_gangs import Counting
from wrong_states import CancelledTooEarly

from diloco_conformance import (
    PROMISES,
    Ability,
    ExecutorConformance,
    ExecutorMachine,
    Fault,
    Harness,
    HarnessFault,
    PromiseBroken,
    Step,
    Truth,
)
from diloco_conformance._lab import Lab
from diloco_conformance._suite import STANDARD, run_machine
from diloco_protocol import Reason, ReplicaState

README = Path(__file__).parents[1] / "README.md"
NAME = "test_c4_a_cancel_that_is_not_accepted_raises"

#: The fixed tests that look at nothing without faults. Where secrets are shown, a fault is one case
#: of many.
OF_FAULTS = [
    name
    for name in STANDARD
    if inspect.isfunction(look := getattr(ExecutorConformance, name))
    and "Fault." in inspect.getsource(look)
    and name != "test_e4_what_is_secret_is_shown_nowhere"
]


def subclass(**members):
    return type(
        "TestMine", (ExecutorConformance,), {"make_harness": lambda self: ToyHarness(), **members}
    )


class TestOverrides:
    @pytest.mark.parametrize(
        "value", [None, lambda self, lab: None, "text"], ids=["none", "function", "text"]
    )
    @pytest.mark.parametrize("name", [NAME, "lab", "test_any_sequence_keeps_every_promise"])
    def test_a_standard_test_is_not_replaced(self, name, value):
        with pytest.raises(TypeError, match=f"TestMine replaces the standard test {name}.*xfail"):
            subclass(**{name: value})

    def test_not_by_a_mixin_either(self):
        mixin = type("Mixin", (), {NAME: lambda self, lab: None})
        with pytest.raises(TypeError, match="replaces"):
            type("TestMine", (mixin, ExecutorConformance), {})

    def test_not_without_a_reason(self):
        for mark in (
            pytest.mark.xfail,
            pytest.mark.xfail(reason=" "),
            pytest.mark.skip(reason="no"),
        ):

            @mark
            def test(self, lab):
                pass

            with pytest.raises(TypeError, match="replaces"):
                subclass(**{NAME: test})

    def test_an_xfail_with_a_reason_is_open(self):
        @pytest.mark.xfail(reason="the cloud has no such thing")
        def test(self, lab):
            pass

        cls = subclass(**{NAME: test})
        with pytest.raises(TypeError):
            type("TestTheirs", (cls,), {"test_s7_a_timeout_is_a_failure": None})

    def test_nothing_is_taken_away_later(self):
        cls = subclass()
        cls.test_s7_a_timeout_is_a_failure = lambda self, lab: None
        with pytest.raises(TypeError, match="test_s7"):
            cls().test_d1_what_it_cannot_do_is_declared(Lab(ToyHarness()))

    def test_own_tests_may_be_added(self):
        assert subclass(test_own=lambda self: None).test_own


class TestDeclarations:
    @pytest.mark.parametrize(
        "cannot",
        [{"fly": "no wings"}, {Step.SUCCEED: "never"}, {Step.OOM: ""}, {Ability.EXPIRE: "  "}],
    )
    def test_wrong_ones_are_refused(self, cannot):
        harness = ToyHarness()
        harness.cannot = cannot
        with pytest.raises(HarnessFault, match="with a reason"):
            Lab(harness)

    def test_what_cannot_be_done_is_skipped_with_its_reason(self):
        harness = ToyHarness()
        harness.cannot = {Step.OOM: "no memory"}
        lab = Lab(harness)
        assert not lab.can(Step.OOM)
        with pytest.raises(pytest.skip.Exception, match="no memory"):
            lab.needs(Step.PRINT, Step.OOM)

    @pytest.mark.parametrize("name", OF_FAULTS)
    def test_no_test_of_faults_passes_where_there_are_none(self, name):
        harness = ToyHarness()
        harness.cannot = dict.fromkeys(Fault, "it never fails")
        lab = Lab(harness)
        with pytest.raises(pytest.skip.Exception, match="it never fails"):
            getattr(ExecutorConformance(), name)(lab)
        lab.close()

    @pytest.mark.parametrize(
        ("attribute", "name"),
        [
            ("many_ranks", "test_h8_more_than_ten_ranks_are_told_apart"),
            ("many_runs", "test_h7_runs_that_go_and_come_meanwhile_hide_no_others"),
        ],
    )
    def test_no_test_of_many_passes_where_there_are_few(self, attribute, name):
        harness = ToyHarness()
        setattr(harness, attribute, 2)
        with pytest.raises(pytest.skip.Exception, match=r"more than 2 r.* are too many"):
            getattr(ExecutorConformance(), name)(Lab(harness))

    def test_one_of_several_faults_is_enough(self):
        harness = ToyHarness()
        harness.cannot = {Fault.CUT: "no cables"}
        lab = Lab(harness)
        assert lab.faults(Fault.CUT, Fault.FORBIDDEN) == [Fault.FORBIDDEN]

    def test_what_the_backend_declares_counts_as_well(self):
        lab = Lab(ToyHarness())
        assert lab.can(Step.PREEMPT)
        lab.capabilities = type(lab.capabilities)("replica")
        assert not lab.can(Step.PREEMPT)

    def test_a_purge_that_nobody_made_is_not_the_executors(self):
        class Deaf(ToyHarness):
            def between(self, action):
                """It is never called."""

        with pytest.raises(HarnessFault, match="has not called action although list_runs was"):
            ExecutorConformance().test_h7_runs_that_go_and_come_meanwhile_hide_no_others(
                Lab(Deaf())
            )

    def test_an_incomplete_harness_says_what_is_missing(self):
        class Incomplete(ToyHarness):
            expire = Harness.expire

        with pytest.raises(NotImplementedError, match=r"no expire\(\); declare Ability.EXPIRE"):
            Incomplete().expire([])

    def test_a_world_that_does_not_obey_is_the_harness_fault(self):
        class Lazy(ToyHarness):
            def drive(self, handle, step, value=None):
                if step is not Step.SUCCEED:
                    super().drive(handle, step, value)

        lab = Lab(Lazy())
        run = lab.up()
        with pytest.raises(HarnessFault, match="was to make rank 0 of run 1 succeed"):
            lab.drive(run.replicas[0], Step.SUCCEED)

    def test_truth_takes_words(self):
        assert (
            Truth("running", alive=True).state is type(Truth("failed", alive=False).state).RUNNING
        )
        with pytest.raises(ValueError, match="gone"):
            Truth("gone", alive=False)


class TestDeclaredAndNotSo:
    """What a harness declares to be impossible is looked at as well, where it can be."""

    def run(self, name, harness):
        with pytest.raises(PromiseBroken) as caught:
            getattr(subclass()(), name)(Lab(harness))
        return caught.value

    def test_a_store_of_secrets(self):
        harness = ToyHarness()
        harness.cannot = {Ability.SECRETS: "there is none"}
        harness.cloud.secrets["anything"] = "there is one"
        assert self.run("test_e3_secrets_arrive_by_reference", harness).promise == "E3"


class TestAskedRankByRank:
    """A backend without a bulk read: right where it declares that, and only there."""

    class ByRank(ToyExecutor):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.capabilities = replace(self.capabilities, calls_per_look="rank")

        def _observe_run(self, handles):
            seen = {}
            for handle in handles:
                seen.update(super()._observe_run([handle]))
            return seen

    @pytest.mark.parametrize("name", [name for name in STANDARD if name.startswith("test_r8")])
    def test_it_passes(self, name):
        harness = harness_of(self.ByRank, gang=False)
        getattr(subclass(make_harness=lambda self: harness())(), name)(Lab(harness()))

    def test_more_calls_than_that_are_noticed(self):
        class Twice(self.ByRank):
            def _observe_run(self, handles):
                if len(handles) > 2:
                    super()._observe_run(handles)
                return super()._observe_run(handles)

        suite, lab = subclass()(), Lab(harness_of(Twice, gang=False)())
        with pytest.raises(PromiseBroken, match="R8"):
            suite.test_r8_the_calls_of_a_look_do_not_grow_with_the_ranks(lab)


class TestMessages:
    def test_a_failure_reads_like_a_sentence(self):
        lab = Lab(harness_of(CancelledTooEarly, gang=False)())
        run = lab.up()
        lab.cancel(run.replicas[0])
        with pytest.raises(PromiseBroken) as caught:
            lab.observe(run.replicas[0])
        assert caught.value.promise == "S5"
        (shown,) = re.findall(
            r"```text\n(S5.*?)\n```", README.read_text(encoding="utf-8"), re.DOTALL
        )
        assert str(caught.value).split() == shown.split()  # the README breaks long lines

    def test_a_sequence_is_made_shorter(self):
        def steps(seed, shrink):
            make_harness = harness_of(CancelledTooEarly, gang=False)
            with pytest.raises(PromiseBroken) as caught:
                run_machine(make_harness, examples=100, steps=30, shrink=shrink, seed=seed)
            return str(caught.value).partition("After:\n")[2].splitlines()

        # How short it gets in a hundred tries is hypothesis's affair, so begin with one that can be
        # made much shorter.
        seed, found = next(
            (seed, found) for seed in range(50) if len(found := steps(seed, shrink=False)) > 15
        )
        shorter = steps(seed, shrink=True)
        assert len(shorter) < len(found)
        assert "cancel" in shorter[-1]

    def test_a_seed_chooses_the_sequences_and_is_named(self):
        def told(seed):
            make_harness = harness_of(CancelledTooEarly, gang=False)
            with pytest.raises(PromiseBroken) as caught:
                run_machine(make_harness, examples=100, steps=30, shrink=False, seed=seed)
            return str(caught.value), caught.value.__notes__

        assert told(1) == told(1) != told(2)
        assert told(1)[1][-1] == "--diloco-seed 1 tries these sequences again"

    def test_rules_of_ones_own_are_tried(self):
        class Mine(ExecutorMachine):
            @rule()
            def complain(self):
                self.lab.broken("D1", "nothing", "my rule was tried")

        with pytest.raises(PromiseBroken, match="my rule was tried"):
            run_machine(ToyHarness, examples=10, steps=20, shrink=False, rules=Mine)

    def test_every_promise_has_a_test(self):
        names = {name.split("_")[1].upper() for name in STANDARD if name.startswith("test_")} - {
            "ANY"
        }
        assert names == set(PROMISES)


class SeenLate(ToyHarness):
    """Replicas start when launched, and are seen to run seconds later, as on a busy machine."""

    starts_by_itself = True

    def __init__(self, seconds, *, ends=True):
        super().__init__()
        self.seconds = seconds
        if not ends:
            self.cloud.pass_time = lambda: None

    def drive(self, handle, step, value=None):
        if step is not Step.START:
            super().drive(handle, step, value)
        elif self.truth(handle).state is ReplicaState.PENDING:
            super().drive(handle, step)
            self.advance(self.seconds)


class TestARealWorldThatIsSlow:
    @pytest.mark.parametrize("seconds", [50.0, 100.0])
    def test_a_replica_may_end_at_its_timeout_before_it_was_seen_for_so_long(self, seconds):
        lab = Lab(SeenLate(seconds))
        run = lab.up(timeout=60.0)
        lab.advance(20.0)
        lab.observe_all()
        assert run.replicas[0].reason is Reason.TIMEOUT
        lab.settle()

    def test_it_has_to_end_when_it_was_seen_for_so_long(self):
        lab = Lab(SeenLate(50.0, ends=False))
        lab.up(timeout=60.0)
        lab.advance(59.0)
        lab.settle()
        lab.advance(2.0)
        with pytest.raises(PromiseBroken, match="S7"):
            lab.settle()

    def test_a_short_timeout_is_no_time_to_be_told_anything(self):
        machine = ExecutorMachine(SeenLate(1.0))
        machine.lab.up(timeout=machine.lab.harness.short_timeout)
        replica = machine.running(0)
        assert replica.run.timeout == machine.lab.harness.timeout
        assert ExecutorMachine(ToyHarness()).running(0) is not None


def test_who_has_not_seen_a_rank_of_a_gang_run_need_not_know_that_it_was_late():
    lab = Lab(harness_of(Counting, gang=True)())
    ExecutorConformance().test_s7_a_timeout_is_a_failure(lab)
    assert [one.said.reason for one in lab.runs[0].replicas] == ["timeout", "gang_failed"]


@pytest.mark.slow
@pytest.mark.parametrize("gang", [False, True])
def test_right_executors_pass_many_sequences(gang):
    seed = secrets.randbelow(10**9)
    run_machine(lambda: ToyHarness(gang=gang), examples=300, steps=50, shrink=True, seed=seed)
