"""Whatever crashes, hangs or is lost, every rank is in the run to its end."""

import pytest
from fixed_lab import random_ended_run, random_run, wrong
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated import (
    KINDS,
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
    world_size = draw(st.integers(1, 4))
    fault = st.builds(
        Fault,
        rank=st.integers(0, world_size - 1),
        incarnation=st.integers(1, 2),
        operation=st.integers(1, 130),
        kind=st.sampled_from(KINDS),
        seconds=st.sampled_from([0.5, 5.0, 60.0]),
    )
    start = st.sampled_from([0.0, 0.01, 1.0, 40.0])
    schedule = Schedule(
        world_size,
        seed=draw(st.integers(0, 2**16)),
        starts=draw(st.lists(start, min_size=world_size, max_size=world_size)),
        faults=draw(st.lists(fault, max_size=7)),
        restart_after=draw(st.sampled_from([0.1, 5.0, 90.0])),
        latency=draw(st.sampled_from([0.001, 0.05, 1.0])),
    )
    state_codec, full_state_every = "plain", None
    if draw(st.integers(0, 2)) == 0:
        state_codec = draw(st.sampled_from(["int8", "e2m1", "bf16"]))
        full_state_every = draw(st.integers(1, 4))
    # Shards are cut between the blocks of codecs, so smaller fragments would have only one that is
    # not empty.
    blocks = [(300,), (70, 40)] if full_state_every else []
    sizes = draw(st.sampled_from([(40,), (40, 30), *blocks]))
    delay, alpha = draw(st.sampled_from([(0, 0.0), (0, 0.0), (0, 0.5), (1, 0.0), (2, 0.5)]))
    codec = draw(st.sampled_from(["plain", "plain", "bf16", "int8"]))
    # What bf16 loses of these values may be nothing, which looks like a residual that was lost.
    feedback = draw(st.sampled_from([False, True, 0.5])) if codec == "int8" else False
    asking = st.tuples(st.integers(0, world_size - 1), st.just(1), st.integers(0, 12))
    return schedule, {
        "sizes": sizes,
        "sync_every": 3 * len(sizes) if delay else 2,
        "delay": delay,
        "alpha": alpha,
        "codec": codec,
        "error_feedback": feedback,
        "weight": draw(st.sampled_from(["equal", "steps", "tokens"])),
        "clip": draw(st.booleans()),
        "save_every": draw(st.sampled_from([1, 10])),
        "groups": len(sizes) > 1 and draw(st.booleans()),
        "state_codec": state_codec,
        "full_state_every": full_state_every,
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
