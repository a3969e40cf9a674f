"""The suite is itself tested: every wrong executor is caught, by the right promise."""

import inspect
from collections import Counter

import pytest
from wrong_all import MUTANTS, harness_of

from diloco_conformance import PROMISES, ExecutorConformance, PromiseBroken
from diloco_conformance._lab import Lab
from diloco_conformance._suite import STANDARD, run_machine

#: The promises whose violations show in sequences of verbs; not plans, arguments, logs, sizes,
#: threads, or errors in the middle of a collect.
OF_SEQUENCES = {
    *("S1", "S2", "S3", "S4", "S5", "S6", "S7", "S8", "S9", "C1", "C2", "C3", "C4", "C6"),
    *("R1", "R2", "R3", "R4", "R5", "R7", "L1", "L3", "H2", "H3"),
}

#: What needs more than one such mistake in a row, a fault in the middle of it, or other words for
#: the same.
TOO_RARE = {
    *("PurgeByPrefix", "CancelRunByPrefix", "EveryErrorIsLost"),
    "HangsOnLargeResults",
    "OverwritesWhatItCannotSee",
    "OrderOfKeysCounts",
}

#: What no rule of the machine does: purging what is being ended, other kinds of handles and times,
#: looking at progress, changing what it got, writing into a journal.
NO_RULE = {
    "WhoIsBeingEndedIsPurged",
    *("CollectsListsAlone", "ReadsTheHandlesTwice", "NothingToCollectIsAnError"),
    *("KeepsTheResultItGives", "KeepsTheEntryItGives"),
    *("LessThanNothingIsNothing", "NotANumberIsForever"),
    *("ProgressIsOfTheFirstLook", "ProgressKnowsNothing"),
    "BelievesEveryJournal",
}


def run_fixed(name, mutant):
    """Run one fixed test, and give the promise that it finds broken."""
    make_harness = harness_of(mutant.cls, gang=mutant.gang)

    class Suite(ExecutorConformance):
        examples = 5

        def make_harness(self):
            return make_harness()

    test = getattr(Suite(), name)
    if not name.startswith("test_") or "lab" not in inspect.signature(test).parameters:
        return None
    try:
        test(Lab(make_harness()))
    except PromiseBroken as error:
        return error.promise
    except pytest.skip.Exception:  # it is of what this executor declares that it cannot do
        return None
    return None


@pytest.mark.sampled
@pytest.mark.parametrize("name", MUTANTS)
def test_its_fixed_test_catches_it(name):
    mutant = MUTANTS[name]
    assert run_fixed(mutant.test, mutant) == mutant.promises[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_what_other_tests_say_of_it_is_right(name):
    mutant = MUTANTS[name]
    broken = {run_fixed(test, mutant) for test in STANDARD} - {None}
    assert broken & set(mutant.promises), f"it breaks {mutant.promises}, and they say {broken}"


def test_every_promise_has_two_wrong_executors_at_least():
    counts = Counter(mutant.promises[0] for mutant in MUTANTS.values())
    assert not {promise: counts[promise] for promise in PROMISES if counts[promise] < 2}


SHOWN_BY_SEQUENCES = [
    name
    for name, mutant in MUTANTS.items()
    if mutant.promises[0] in OF_SEQUENCES and name not in TOO_RARE | NO_RULE
]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN_BY_SEQUENCES)
def test_sequences_catch(name):
    mutant = MUTANTS[name]
    with pytest.raises(PromiseBroken):
        # It ends at the first sequence that breaks a promise, mostly within 40. Which sequences are
        # tried depends on what else is imported, since hypothesis draws from the constants of
        # modules: so many that no choice of them misses.
        run_machine(harness_of(mutant.cls, gang=mutant.gang), examples=500, steps=30, shrink=False)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name",
    ["CancelledTooEarly", "CancelOverwritesTerminal", "DrainingCollect", "TimeoutIsCancelled"],
)
def test_sequences_catch_a_sample(name):
    test_sequences_catch(name)
