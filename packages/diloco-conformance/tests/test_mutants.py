"""The suite is itself tested: every wrong executor is caught, by the right promise."""

import inspect

import pytest
from wrong_all import MUTANTS, harness_of

from diloco_conformance import ExecutorConformance, PromiseBroken
from diloco_conformance._lab import Lab
from diloco_conformance._suite import STANDARD, run_machine

#: What sequences of verbs cannot show: plans, arguments, logs, sizes, and errors in the middle of a collect.
BEYOND_SEQUENCES = {"HangsOnLargeResults", "G1", "L4", "L5", "L6", "R6", "R8", "D1"}


def fixed_tests(make_harness):
    """Run the fixed tests one by one, and give the promises that they find broken."""

    class Suite(ExecutorConformance):
        examples = 5

        def make_harness(self):
            return make_harness()

    broken = []
    for name in STANDARD:
        test = getattr(Suite(), name)
        if not name.startswith("test_") or "lab" not in inspect.signature(test).parameters:
            continue
        lab = Lab(make_harness())
        try:
            test(lab)
        except PromiseBroken as error:
            broken.append(error.promise)
    return broken


@pytest.mark.parametrize("name", MUTANTS)
def test_fixed_tests_catch(name):
    cls, promises, gang = MUTANTS[name]
    broken = fixed_tests(harness_of(cls, gang=gang))
    assert broken, "no fixed test has caught it"
    assert set(broken) & promises, f"caught, but by {broken} and not by one of {sorted(promises)}"


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, (_, promises, _) in MUTANTS.items()
        if not ({name} | promises) & BEYOND_SEQUENCES
    ],
)
def test_sequences_catch(name):
    cls, _, gang = MUTANTS[name]
    with pytest.raises(PromiseBroken):
        # It ends at the first sequence that breaks a promise, mostly within 40. Which sequences are tried depends on what else
        # is imported, since hypothesis draws from the constants of modules: so many that no choice of them misses.
        run_machine(harness_of(cls, gang=gang), examples=500, steps=30, shrink=False)
