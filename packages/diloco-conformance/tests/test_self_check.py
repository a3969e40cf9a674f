"""A harness that cannot judge is told so, with what to do, before any test of the executor."""

import inspect
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_toy import ToyHarness
from toy_executor import ToyExecutor
from wrong_all import MUTANTS, harness_of

from diloco_conformance import (
    Ability,
    ExecutorConformance,
    Harness,
    HarnessFault,
    Puppets,
    Step,
)
from diloco_conformance._self_check import check_harness
from diloco_conformance._words import HOOKS
from diloco_protocol import Capabilities


def fault(cls):
    with pytest.raises(HarnessFault) as caught:
        check_harness(cls, "TestMine")
    return str(caught.value)


def mended(cls, *, method):
    """What is said of a harness; it ends with the line of that method."""
    said = fault(cls)
    file, line = Path(inspect.getsourcefile(cls)).name, inspect.getsourcelines(vars(cls)[method])[1]
    assert said.endswith(f"{file}:{line}: {method}"), said
    return said


def test_a_right_one_passes():
    check_harness(ToyHarness, "TestMine")
    check_harness(lambda: ToyHarness(gang=True), "TestMine")


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["PollFlips", "PlaceholderLogs", "OnlyRankZeroCanBeCancelled"])
def test_what_the_executor_does_wrong_is_left_to_the_tests(name):
    mutant = MUTANTS[name]
    check_harness(harness_of(mutant.cls, gang=mutant.gang), "TestMine")


#: They reach into the cloud past its API, and so past its faults.
REACHING_IN = {
    *("PurgeIsOnlyBegun", "PurgesInTheDark", "LogsByPrefix"),
    *("ShowsTheLogOfAnotherRun", "ShowsTheResultOfAnotherRun"),
}


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))]
)
def test_no_wrong_executor_is_the_harness_fault(part):
    for name in [name for name in MUTANTS if name not in REACHING_IN][part::8]:
        mutant = MUTANTS[name]
        check_harness(harness_of(mutant.cls, gang=mutant.gang), f"TestMine of {name}")


class TestTheClass:
    def test_no_harness(self):
        assert "TestMine.make_harness() returned None: it must" in fault(lambda: None)

    def test_a_method_is_missing(self):
        class Mine(ToyHarness):
            truth = Harness.truth

        Mine.__abstractmethods__ = frozenset({"truth"})
        assert "abstract" in fault(Mine)
        assert "docs/harness.md" in fault(Mine)

    def test_an_attribute_is_missing(self):
        class Mine(ToyHarness):
            entrypoint = None

        assert "Mine: it lacks entrypoint: set it to" in fault(Mine)

    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            ("entrypoint", "train.py", "the entrypoint 'train.py' names a file"),
            ("entrypoint_args", {"a": float("nan")}, "entrypoint_args.a is nan"),
            ("run_prefix", "Conf", "run_prefix='Conf' cannot begin the names of runs"),
            ("keeps_carriage_returns", "no", "keeps_carriage_returns must be True or False"),
            ("patience", 0, "patience must be a positive number of seconds"),
            ("timeout", float("inf"), "timeout must be a number of seconds"),
        ],
    )
    def test_what_no_launch_takes(self, name, value, words):
        assert f"Mine: {words}" in fault(type("Mine", (ToyHarness,), {name: value}))

    def test_init_of_the_base_was_forgotten(self):
        class Mine(ToyHarness):
            def __init__(self):
                pass

        assert "must call super().__init__()" in fault(Mine)

    def test_init_takes_something_else(self):
        class Mine(ToyHarness):
            def __init__(self, cloud):
                super().__init__()

        said = fault(Mine)
        assert "TypeError was raised" in said
        assert "missing 1 required positional argument: 'cloud'" in said

    @pytest.mark.parametrize(
        ("name", "value"),
        [("patience", "long"), ("slack", -1), ("cannot", ["oom"]), ("short_timeout", 9999.0)],
    )
    def test_a_wrong_value(self, name, value):
        assert f"Mine: {name}" in fault(type("Mine", (ToyHarness,), {name: value}))

    @pytest.mark.parametrize("name", ["slack", "resolution", "overrun"])
    def test_nothing_late_is_overlooked_where_time_is_virtual(self, name):
        said = fault(type("Mine", (ToyHarness,), {name: 1e6}))
        assert f"Mine: {name} is 1e+06 s where time is virtual and short_timeout 60 s: with" in said

    def test_wrong_arguments(self):
        class Mine(ToyHarness):
            def drive(self, handle, step):
                pass

        assert "drive is called as drive(self, handle" in fault(Mine)

    def test_a_method_too_many(self):
        class Mine(ToyHarness):
            settle_ = None
            expire = Harness.expire

            def expires(self, handles):
                pass

        assert "it has expires, which the suite never uses: is it expire?" in fault(Mine)

    def test_only_three_abilities_need_no_method(self):
        assert {*Ability} - {*HOOKS} == {Ability.RACE, Ability.TIMEOUT, Ability.RESTART}

    @pytest.mark.sampled
    @pytest.mark.parametrize(("ability", "hook"), HOOKS.items())
    def test_nothing_is_left_out_in_silence(self, ability, hook):
        mine = type("Mine", (ToyHarness,), {hook: getattr(Harness, hook)})
        said = fault(mine)
        assert f"Mine: it lacks {hook}(): write what this world can do" in said
        assert f"Ability.{ability.name}" in said
        abilities = [one for one in HOOKS if HOOKS[one] == hook]
        mine.cannot = dict.fromkeys(
            [*abilities, Step.PRINT], "nobody can"
        )  # the toy prints by write
        check_harness(mine, "TestMine")


class TestTheExecutor:
    def made(self, make):
        return fault(type("Mine", (ToyHarness,), {"make_executor": make}))

    def test_none_at_all(self):
        assert "which is no executor: it must be a subclass" in self.made(
            lambda self, **options: object()
        )

    def test_an_attribute_is_missing(self):
        class Mine(ToyExecutor):
            backend_name = None

        said = self.made(lambda self, **options: Mine(self.cloud, backoff=self.backoff()))
        assert (
            "Mine has backend_name = None: it must be str, declared on the class, such as "
            'backend_name = "' in said
        )

    def test_capabilities_are_missing(self):
        class Mine(ToyExecutor):
            def __init__(self, cloud, **options):
                super().__init__(cloud, **options)
                del self.capabilities

        said = self.made(lambda self, **options: Mine(self.cloud, backoff=self.backoff()))
        assert "Mine lacks capabilities: it must be Capabilities" in said

    def test_the_same_twice(self):
        kept = []

        def make(self, **options):
            kept.append(ToyExecutor(self.cloud, backoff=self.backoff()))
            return kept[0]

        assert "returned the same object twice" in self.made(make)

    def test_init_of_the_base_was_forgotten(self):
        class Mine(ToyExecutor):
            capabilities = Capabilities("replica")

            def __init__(self, cloud):
                self.cloud = cloud

        said = self.made(lambda self, **options: Mine(self.cloud))
        line = inspect.getsourcelines(Mine.__init__)[1]
        assert "the __init__ of Mine must call super().__init__(backoff=…)" in said
        assert said.endswith(f"test_self_check.py:{line}: __init__")

    def test_the_backoff_was_forgotten(self):
        assert "pass backoff=self.backoff()" in self.made(
            lambda self, **options: ToyExecutor(self.cloud)
        )

    def test_the_backoff_is_not_passed_on(self):
        class Ignores(ToyExecutor):
            def __init__(self, cloud, *, backoff):
                super().__init__(cloud)

        said = self.made(lambda self, **options: Ignores(self.cloud, backoff=self.backoff()))
        assert "the __init__ of Ignores does not pass it on" in said

    def test_no_options_are_taken(self):
        said = self.made(lambda self: ToyExecutor(self.cloud, backoff=self.backoff()))
        assert "make_executor is called as make_executor(self, **options" in said

    @pytest.mark.parametrize("name", ["env", "journal", "run_id"])
    def test_an_option_is_not_handed_on(self, name):
        def make(self, **options):
            options.pop(name, None)
            return ToyExecutor(self.cloud, backoff=self.backoff(), **options)

        said = self.made(make)
        assert f"does not give {name} to the constructor of ToyExecutor: write" in said
        assert said.endswith(f":{inspect.getsourcelines(make)[1]}: make")

    @pytest.mark.parametrize("name", ["DropsItsEnvironment", "TakesNoEnvironment"])
    def test_a_constructor_that_drops_it_is_left_to_the_tests(self, name):
        check_harness(harness_of(MUTANTS[name].cls, gang=False), "TestMine")


@pytest.mark.parametrize("patience", [30.0, 1000.0])
@pytest.mark.parametrize("method", ["settle", "expire", "inject"])
def test_an_executor_that_is_patient_in_every_verb_hides_no_fault(patience, method):
    def idle(self, *arguments, **options):
        self.wanted = arguments, options

    def inject(self, operation, fault, *, after=0):
        if operation != "cancel":
            ToyHarness.inject(self, operation, fault, after=after)

    class Patient(ToyHarness):
        def make_executor(self, **options):
            return ToyExecutor(self.cloud, backoff=self.backoff(), patience=patience, **options)

    changed = inject if method == "inject" else idle
    said = fault(type("Mine", (Patient,), {method: changed}))
    assert {
        "settle": "settle() returned while a cancel is still under way",
        "expire": "after expire(handles) the world still tells",
        "inject": "changes nothing: a cancel was accepted",
    }[method] in said


class TestTheWorld:
    def test_settle_does_nothing(self):
        class Mine(ToyHarness):
            def settle(self):
                pass

        assert "settle() returned while a cancel is still under way" in fault(Mine)

    def test_time_stands_still(self):
        class Mine(ToyHarness):
            def advance(self, seconds):
                self.wanted = seconds
                self.cloud.pass_time()

        assert "advance(1) let 0 s pass by clock(): call self.time.sleep(seconds)" in fault(Mine)

    def test_a_print_is_not_recorded(self):
        class Mine(ToyHarness):
            def drive(self, handle, step, value=None):
                if step is not Step.PRINT:
                    super().drive(handle, step, value)

        assert "the log is empty. Either drive writes where the executor" in fault(Mine)

    @pytest.mark.parametrize("verb", ["poll", "describe", "collect"])
    def test_the_truth_is_what_the_executor_says(self, verb):
        class Mine(ToyHarness):
            def truth(self, handle):
                said = getattr(self.make_executor(), verb)
                said([handle], timeout=0) if verb == "collect" else said(handle)
                return super().truth(handle)

        assert f"calls the executor ({'' if verb != 'collect' else 'collect, '}" in fault(Mine)

    def test_the_truth_is_no_truth(self):
        class Mine(ToyHarness):
            def truth(self, handle):
                return super().truth(handle).state

        assert "truth() returned" in fault(Mine)

    def test_drive_does_nothing(self):
        class Mine(ToyHarness):
            def drive(self, handle, step, value=None):
                self.wanted = handle, step, value

        assert "the world was to make rank 0 of run" in fault(Mine)

    def test_nobody_is_counted(self):
        class Mine(ToyHarness):
            def living(self):
                return None

        assert "living() returned None: it must return how many" in fault(Mine)


def test_no_test_is_run_then():
    class Mine(ExecutorConformance):
        def make_harness(self):
            return None

    for _ in range(2):
        with pytest.raises(HarnessFault, match="must return a fresh object"):
            Mine()._sound()


@pytest.mark.processes
@pytest.mark.parametrize("killed", [True, False])
def test_puppets_end_with_the_process_that_holds_their_strings(tmp_path, killed):
    """Killed, it leaves a folder, and its lock is gone; otherwise it removes the folder."""
    program = (
        "import sys, pathlib, subprocess; from diloco_conformance import Puppets\n"
        "puppets = Puppets(pathlib.Path(sys.argv[1])); print('locked', flush=True); "
        "sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    holder.stdout.readline()
    environment = {"DILOCO_RUN_ID": "run", "REPLICA_RANK": "0", "DILOCO_ATTEMPT": "1"}
    puppet = subprocess.Popen(
        [sys.executable, "-c", f"import puppet; puppet.perform({str(tmp_path)!r})"],
        env={**environment, "PYTHONPATH": str(Puppets.source)},
        stderr=subprocess.PIPE,
    )
    while not list(tmp_path.glob("[!.]*.told")):  # the others are still being written
        assert puppet.poll() is None
        time.sleep(0.01)
    if killed:
        holder.kill()
    else:
        shutil.rmtree(tmp_path)
    _, said = puppet.communicate(timeout=300)
    holder.communicate()
    assert b"is over" in said
