"""Whatever crashes, hangs or is lost, every rank is in the run to its end."""

import pytest
from fixed_lab import random_ended_run, random_run, wrong
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedules_lab import drawn_schedule, drawn_state
from simulated import (
    CheckedStore,
    Fault,
    Fixed,
    Schedule,
    SimulatedTraining,
    simulate,
    violations,
)

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
LOST_AFTER = 90.0


@st.composite
def _runs(draw):
    schedule = drawn_schedule(draw, st.integers(1, 4), [0.5, 5.0, 60.0], 7)
    state = drawn_state(draw, encoded=True)
    sizes = state["sizes"]
    delay, alpha = draw(st.sampled_from([(0, 0.0), (0, 0.0), (0, 0.5), (1, 0.0), (2, 0.5)]))
    codec = draw(st.sampled_from(["plain", "plain", "bf16", "int8"]))
    # What bf16 loses of these values may be nothing, which looks like a residual that was lost.
    feedback = draw(st.sampled_from([False, True, 0.5])) if codec == "int8" else False
    asking = st.tuples(st.integers(0, schedule.world_size - 1), st.just(1), st.integers(0, 12))
    return schedule, {
        **state,
        "sync_every": 3 * len(sizes) if delay else 2,
        "delay": delay,
        "alpha": alpha,
        "codec": codec,
        "error_feedback": feedback,
        "weight": draw(st.sampled_from(["equal", "steps", "tokens"])),
        "clip": draw(st.booleans()),
        "save_every": draw(st.sampled_from([1, 10])),
        "groups": len(sizes) > 1 and draw(st.booleans()),
        "wishes": draw(st.dictionaries(asking, st.sampled_from([0.25, 1.0]), max_size=2)),
    }


def _check(schedule, options):
    training = SimulatedTraining(5, **options)
    outcome = simulate(training, schedule, Fixed(LOST_AFTER), store=CheckedStore())
    # What is started in the place of an incarnation that has left is refused: of one that was
    # killed after that, or was taken for dead.
    late = "has left the run"
    by_rule = [late]
    if any(late in str(result) for result in outcome.results.values()):
        by_rule.append("not every rank came to the end")
    errors = violations(outcome, training)
    assert [what for what in errors if not any(part in what for part in by_rule)] == []


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [57, 93, 256, 504, 578])
def test_an_incarnation_that_was_replaced_while_it_hung_is_told_so(seed):
    """It is fenced: it waits for nothing that is never published, and asks for no new start."""
    kinds = ("kill before", "kill after", "zombie", "lose answer", "tear", "delay")
    assert random_run(seed, kinds) == []


_LOADS = Fault(1, 2, 14, "zombie", 3.0), Fault(1, 2, 24, "delay", 60.0)


@pytest.mark.parametrize(
    ("faults", "seed"),
    [
        ([Fault(1, 1, 43, "zombie", 12.0), Fault(1, 2, 42, "delay", 60.0)], 0),
        ([Fault(1, 1, 48, "zombie", 60.0), *_LOADS, Fault(1, 3, 59, "delay", 60.0)], 75),
    ],
    ids=["one that waits", "one that loads"],
)
def test_an_incarnation_leaves_the_part_of_a_newer_one_alone(faults, seed):
    """The record names the newer one, which holds the unsent part, and has not published it yet."""
    assert wrong(Schedule(2, seed=seed, faults=faults), SimulatedTraining(4, (40,), 2))[0] == []


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 1500), marks=pytest.mark.slow)]
)
def test_a_run_that_ends_and_is_resumed(seeds):
    assert [found for found in map(random_ended_run, seeds) if found] == []


@given(_runs())
@settings(max_examples=12, deadline=None, suppress_health_check=_QUIET)
def test_schedules(run):
    _check(*run)


@pytest.mark.slow
@given(_runs())
@settings(max_examples=1500, deadline=None, suppress_health_check=_QUIET)
def test_many_schedules(run):
    _check(*run)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "operation", [pytest.param(n, marks=[] if n % 2 else pytest.mark.slow) for n in range(1, 36)]
)
def test_bits_that_flip_while_an_incarnation_begins_end_nothing(operation):
    fault = Fault(0, 1, operation, "flip")
    schedule = Schedule(2, seed=0, starts=[0.0, 0.0], faults=[fault], latency=0.001)
    _check(schedule, {"sizes": (40,)})
