"""A harness method that does not do its task is named with its line; the executor is not blamed."""

import dataclasses
import inspect
import re

import pytest
from test_self_check import fault, mended
from test_toy import ToyHarness
from toy_cloud import ToyCloud
from toy_executor import ToyExecutor
from toy_states import STATES, status_of

from diloco_conformance import Ability, Fault, PromiseBroken, Resources, Step, Truth
from diloco_conformance._lab import Lab
from diloco_conformance._self_check import check_harness
from diloco_protocol import UnavailableError


class TestWhatIsTold:
    def test_living_counts_nobody(self):
        class Mine(ToyHarness):
            def living(self):
                return 0

        said = mended(Mine, method="living")
        assert "living() was 0 before a launch of two replicas, and is 0 now, although" in said

    def test_living_counts_those_that_have_ended(self):
        class Mine(ToyHarness):
            def living(self):
                return len(self.cloud.jobs)

        said = mended(Mine, method="living")
        assert re.search(
            r"living\(\) was (\d), one replica was made to succeed, and it is \1", said
        )

    def test_calls_are_constant(self):
        class Mine(ToyHarness):
            def calls(self):
                return 7

        said = mended(Mine, method="calls")
        assert (
            "calls() was 7 before poll and list_runs by an executor that had seen nothing, and is 7"
            in said
        )

    def test_nothing_was_sent(self):
        class Mine(ToyHarness):
            def sent(self):
                return []

        assert "sent() is empty after a launch" in mended(Mine, method="sent")

    @pytest.mark.parametrize("name", ["rank", "world_size"])
    def test_what_a_replica_was_told_is_what_its_handle_says(self, name):
        class Mine(ToyHarness):
            def told(self, handle):
                return dataclasses.replace(super().told(handle), **{name: getattr(handle, name)})

        assert f"told() has its {name} from the handle" in mended(Mine, method="told")

    def test_elsewhere_is_here(self):
        class Mine(ToyHarness):
            def elsewhere(self):
                return self.make_executor()

        said = mended(Mine, method="elsewhere")
        assert "the executor of elsewhere() lists 'conf-1', which was launched here" in said

    def test_elsewhere_is_another_backend(self):
        class Other(ToyExecutor):
            backend_name = "other"

        class Mine(ToyHarness):
            def elsewhere(self):
                return Other(ToyCloud(self.clock), backoff=self.backoff())

        assert "returned an executor of 'other': it must" in mended(Mine, method="elsewhere")

    def test_a_secret_is_its_own_reference(self):
        class Mine(ToyHarness):
            def secret(self, value):
                return value

        assert "secret() returned 'conf-secret'" in mended(Mine, method="secret")


class TestTheTruth:
    def test_it_shares_the_executor_s_function(self):
        class Mine(ToyHarness):
            def truth(self, handle):
                job = self.cloud.find(handle.metadata)
                if job is None:
                    return Truth(None, alive=False)
                return Truth(status_of(job).state, job.live, job.attempt, job.stopping)

        said = mended(Mine, method="truth")
        assert "truth() has its states from STATES, status_of, and so has the executor" in said

    def test_it_shares_the_executor_s_method(self):
        class Mine(ToyHarness):
            def truth(self, handle):
                job = self.cloud.find(handle.metadata)
                if job is None:
                    return Truth(None, alive=False)
                status = self.make_executor()._status(job)
                return Truth(status.state, job.live, job.attempt, job.stopping)

        assert "ToyExecutor._status" in mended(Mine, method="truth")

    def test_it_shares_the_executor_s_table(self):
        class Mine(ToyHarness):
            def truth(self, handle):
                job = self.cloud.find(handle.metadata)
                if job is None:
                    return Truth(None, alive=False)
                return Truth(STATES[job.status][0], job.live, job.attempt, job.stopping)

        assert "truth() has its states from STATES, and" in mended(Mine, method="truth")


class TestWhatIsDone:
    @pytest.mark.sampled
    @pytest.mark.parametrize("only", ["launch", "observe", "cancel", "purge", "logs"])
    def test_a_disturbance_does_not_disturb(self, only):
        class Mine(ToyHarness):
            def inject(self, operation, fault, *, after=0):
                if operation != only:
                    super().inject(operation, fault, after=after)

        said = mended(Mine, method="inject")
        assert f"inject(<Operation.{only.upper()}: '{only}'>" in said
        assert "changes nothing" in said

    def test_the_first_calls_are_disturbed_too(self):
        class Mine(ToyHarness):
            def inject(self, operation, fault, *, after=0):
                super().inject(operation, fault, after=after * 0)

        assert "after=1000) a launch is refused: the first" in mended(Mine, method="inject")

    def test_a_disturbance_after_some_calls_never_comes(self):
        class Mine(ToyHarness):
            def inject(self, operation, fault, *, after=0):
                if not after:
                    super().inject(operation, fault)

        assert "after=1), 4 launches went well" in mended(Mine, method="inject")

    def test_a_disturbance_does_not_end(self):
        class Mine(ToyHarness):
            def clear(self):
                pass

        assert "and clear(), a look raises" in mended(Mine, method="clear")

    def test_days_do_not_pass(self):
        class Mine(ToyHarness):
            def age(self, seconds):
                self.wanted = seconds

        assert "age(86400) let 0 s pass by now()" in mended(Mine, method="age")

    def test_nothing_expires(self):
        class Mine(ToyHarness):
            def expire(self, handles):
                self.wanted = handles

        assert "after expire(handles) the world still tells Truth(" in mended(Mine, method="expire")

    def test_a_stream_is_ignored(self):
        class Mine(ToyHarness):
            def write(self, handle, data, stream="stdout"):
                super().write(handle, data, stream and "stdout")

        assert "wrote to standard output: the logs are" in mended(Mine, method="write")

    def test_the_records_are_dated_by_a_clock_that_stands(self):
        class Mine(ToyHarness):
            def now(self):
                return 1000.0

        said = mended(Mine, method="now")
        assert "advance(1) let 0 s pass by now(), and more by clock()" in said

    @pytest.mark.parametrize("name", ["labels", "resources", "lose", "foreign", "remove", "secret"])
    def test_a_method_that_uses_nothing_of_what_it_is_given(self, name):
        def nothing(self, handle, left=None):
            return None

        def constant(self, handle):
            return {"labels": {}, "resources": Resources(), "secret": "reference"}.get(name)

        method = nothing if name == "lose" else constant
        said = fault(type("Mine", (ToyHarness,), {name: method}))
        assert f"Mine: {name}() never uses its argument handle" in said
        assert said.endswith(f":{inspect.getsourcelines(method)[1]}: {method.__name__}")

    def test_what_is_left_out_need_not_use_anything(self):
        class Mine(ToyHarness):
            cannot = {Ability.LOSE: "not here"}

            def lose(self, handle, left=None):
                pass

        check_harness(Mine, "TestMine")


#: What each method may give by mistake, and what is said of it.
WRONG_TYPES = {
    "make_executor": [None, "executor"],
    "truth": [None, "running", Truth("running", alive="yes"), Truth("running", True, "1")],
    "living": [None, "2", 2.0, -1, True],
    "calls": [None, "7", 7.5, True],
    "sent": [None, {}, ["request"]],
    "told": [None, {"rank": 0}],
    "labels": [None, "a=b"],
    "resources": [None, {"gpu": "H100"}],
    "secret": [None, b"reference", ""],
    "elsewhere": [None, "executor"],
    "now": [None, "today", float("nan"), True],
    "clock": [None, "now", float("inf")],
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG_TYPES.items() for value in values]
)
def test_each_method_gives_what_it_must(name, value):
    def given(self, *arguments, **options):
        return value

    said = fault(type("Mine", (ToyHarness,), {name: given}))
    assert f"Mine: {name}() returned " in said
    assert re.search(r"must (be|return) ", said)
    assert "test_self_check_world.py:" in said


@pytest.mark.parametrize("name", ["rank", "world_size", "kwargs", "environment"])
def test_what_was_told_has_the_right_types(name):
    class Mine(ToyHarness):
        def told(self, handle):
            return dataclasses.replace(super().told(handle), **{name: "0"})

    assert f"told() returned {name}='0': it must be" in mended(Mine, method="told")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("many_ranks", 2.5),
        ("many_runs", "12"),
        ("long_log", 0),
        ("gpus", "H100"),
        ("starts_by_itself", "no"),
        ("run_prefix", None),
        ("settle", None),
        ("cannot", {"speed": "slow"}),
    ],
)
def test_each_attribute_is_what_it_must_be(name, value):
    said = fault(type("Mine", (ToyHarness,), {name: value}))
    assert name in said


def test_methods_that_are_no_plain_methods():
    class Waits(ToyHarness):
        async def settle(self):
            pass

    class Yields(ToyHarness):
        def advance(self, seconds):
            yield

    assert "so that calling it does nothing" in mended(Waits, method="settle")
    assert "so that calling it does nothing" in mended(Yields, method="advance")


class TestMistakes:
    def test_in_the_harness(self):
        class Mine(ToyHarness):
            def living(self):
                return sum(job.alive for job in self.cloud.jobs.values())

        said = fault(Mine)
        assert (
            "TestMine: before the first test, AttributeError was raised: 'Job' object has" in said
        )
        assert re.search(r"test_self_check_world.py:\d+, in <genexpr>$", said)

    @pytest.mark.parametrize("error", [UnavailableError("no answer"), KeyError("no such key")])
    @pytest.mark.parametrize(
        "method", ["truth", "drive", "inject", "expire", "secret", "elsewhere", "close"]
    )
    def test_an_error_of_any_kind_in_the_harness(self, method, error):
        def raises(self, *arguments, **options):
            raise error

        said = fault(type("Mine", (ToyHarness,), {method: raises}))
        assert repr(error) in said or f"{type(error).__name__} was raised: {error}" in said
        assert re.search(r"test_self_check_world.py:\d+, in raises", said)

    def test_in_the_world_while_the_executor_calls_it(self):
        class Cloud(ToyCloud):
            def describe(self, run_id):
                return {}["no such key"]

        class Mine(ToyHarness):
            def __init__(self):
                super().__init__()
                self.cloud = Cloud(self.clock)

        said = fault(Mine)
        assert (
            "while the executor was called, the world itself raised KeyError: 'no such key'" in said
        )
        assert re.search(r"test_self_check_world.py:\d+, in describe\)", said)

    def test_in_the_executor_is_the_executor_s(self):
        class Wrong(ToyExecutor):
            def _stop(self, handle):
                raise KeyError(handle.metadata["no such key"])

        class Mine(ToyHarness):
            def make_executor(self, **options):
                return Wrong(self.cloud, backoff=self.backoff(), **options)

        check_harness(Mine, "TestMine")
        lab = Lab(Mine())
        run = lab.up()
        with pytest.raises(PromiseBroken, match=r"test_self_check_world.py:\d+, in _stop\)"):
            lab.cancel(run.replicas[0])

    def test_what_the_world_means_to_raise_is_the_executor_s_to_translate(self):
        class Wrong(ToyExecutor):
            def _stop(self, handle):
                self.cloud.stop(handle.metadata["name"], "another uid")

        class Mine(ToyHarness):
            def make_executor(self, **options):
                return Wrong(self.cloud, backoff=self.backoff(), **options)

        lab = Lab(Mine())
        run = lab.up()
        with pytest.raises(PromiseBroken, match="CloudError: NotFound"):
            lab.cancel(run.replicas[0])


def test_a_world_that_can_do_little_is_asked_for_little():
    class Mine(ToyHarness):
        cannot = dict.fromkeys([*Fault, *Ability, Step.PRINT, Step.OOM], "not here")
        inject = calls = sent = told = write = secret = labels = age = elsewhere = expire = (
            lambda self, *arguments, **options: pytest.fail("it was asked")
        )

    check_harness(Mine, "TestMine")


def test_nothing_of_the_check_is_left():
    worlds = []

    class Mine(ToyHarness):
        def __init__(self):
            super().__init__()
            worlds.append(self)

    check_harness(Mine, "TestMine")
    assert [world.living() for world in worlds] == [0]
    assert not worlds[0].cloud.faults
