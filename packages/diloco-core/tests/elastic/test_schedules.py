"""Any schedule of crashes, delays, lost messages, hangs and late arrivals leaves a correct run."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedules_lab import drawn_schedule, drawn_state
from simulated import CheckedStore, Fault, Schedule, SimulatedTraining, simulate, violations

from diloco_core import Elastic, Seconds

_PATIENCE = 500.0  # seconds, less than ``sync_timeout``: a delay may fall on several requests
_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


@st.composite
def _runs(draw):
    schedule = drawn_schedule(draw, st.integers(2, 4), [0.5, 5.0, 60.0, 400.0], 9)
    world_size = schedule.world_size
    topology = draw(st.sampled_from(["sharded", "gather"]))
    elastic = Elastic(
        draw(st.integers(1, world_size)),
        grace=draw(st.sampled_from([2.0, 30.0])),
        late=draw(st.sampled_from(["carry", "drop"])),
        topology=topology,
        publish_every=draw(st.integers(1, 3)) if topology == "gather" else None,
        retention=draw(st.integers(1, 2)),
    )
    state = drawn_state(draw, encoded=topology == "sharded")
    sizes = state["sizes"]
    lossy = [("bf16", False), ("int8", False), ("int8", True), ("int8", 0.9), ("topk64", 0.95)]
    codec, feedback = draw(st.sampled_from([("plain", False), ("plain", False), *lossy]))
    delay, alpha = draw(
        st.sampled_from([(0, 0.0), (0, 0.0), (0, 0.5), (1, 0.0), (2, 0.5), (1, 1.0)])
    )
    save_every = draw(st.sampled_from([10, 1])) if feedback else 10
    asking = st.tuples(st.integers(0, world_size - 1), st.integers(1, 2), st.integers(0, 12))
    wishes = draw(st.dictionaries(asking, st.sampled_from([0.125, 0.25, 1.0]), max_size=3))
    every = draw(st.sampled_from([None, None, Seconds(8), Seconds(20)]))
    weight = draw(st.sampled_from(["equal", "steps", "tokens"]))
    pace = st.sampled_from([0.5, 1.0, 4.0, 15.0])
    return (
        schedule,
        elastic,
        {
            **state,
            "sync_every": every or (3 * len(sizes) if delay else 2),
            "paces": draw(st.lists(pace, min_size=world_size, max_size=world_size))
            if every
            else (),
            "codec": codec,
            "delay": delay,
            "alpha": alpha,
            "error_feedback": feedback,
            "save_every": save_every,
            "wishes": wishes,
            "weight": None if every is not None and weight == "equal" else weight,
            "clip": draw(st.booleans()),
            "groups": len(sizes) > 1 and draw(st.booleans()),
        },
    )


def _rate(rank, incarnation, sync):
    """The outer learning rate that every incarnation would take for itself."""
    return 1 / (1 + rank + incarnation + sync)


def _check(schedule, elastic, options):
    training = SimulatedTraining(5, lr=_rate, **options)
    outcome = simulate(training, schedule, elastic, store=CheckedStore())
    # Who is held up for longer than the others wait ends their run, by rule and with an error that
    # names it.
    held_up = [
        sum(fault.seconds for fault in schedule.faults if fault.rank == rank)
        for rank in range(schedule.world_size)
    ]
    by_rule = ("raised SyncTimeoutError(", "not every rank came to the end")
    by_rule = by_rule if max(held_up) > _PATIENCE else ()
    errors = violations(outcome, training)
    assert [what for what in errors if not any(part in what for part in by_rule)] == []


@given(_runs())
@settings(max_examples=10, deadline=None, suppress_health_check=_QUIET)
def test_schedules(run):
    assert eval(repr(run)) == run  # so a failure says what to give to _check to see it again
    _check(*run)


@pytest.mark.slow
@given(_runs())
@settings(max_examples=2000, deadline=None, suppress_health_check=_QUIET)
def test_many_schedules(run):
    _check(*run)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("first", "second"),
    [
        *itertools.product(["lose request", "lose answer"], ["delay", "flip", "lose answer"]),
        ("delay", "lose request"),
    ],
)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_trouble_while_the_store_is_tried_out(first, second, at):
    """Also an answer that takes a minute and gets lost, which is no outage."""
    for other in range(1, 6):
        faults = [Fault(0, 1, at, first, 60.0), Fault(0, 1, at + other, second, 60.0)]
        schedule = Schedule(2, faults=faults, latency=0.001)
        _check(schedule, Elastic(1, grace=2.0, topology="sharded"), {"sizes": (40,)})


@pytest.mark.sampled
@pytest.mark.parametrize("at", range(72, 80))
def test_an_incarnation_says_that_a_residual_is_lost_and_dies_too(at):
    """The incarnation after it goes on with the zero that was saved, and has nothing to say."""
    faults = [Fault(3, incarnation, at + incarnation, "kill after") for incarnation in (1, 2)]
    schedule = Schedule(4, faults=faults, restart_after=0.1, latency=0.001)
    elastic = Elastic(1, grace=2.0, topology="sharded", retention=1)
    _check(schedule, elastic, {"sizes": (40, 30), "codec": "int8", "error_feedback": True})


def test_a_simulation_is_repeatable_to_the_last_request():
    faults = [
        Fault(1, 1, 30, "kill after"),
        Fault(0, 1, 50, "zombie", 90.0),
        Fault(2, 1, 40, "delay", 60.0),
    ]
    traces = []
    for _ in range(2):
        training = SimulatedTraining()
        outcome = simulate(training, Schedule(3, seed=5, faults=faults), Elastic(2, grace=20.0))
        traces.append(
            (outcome.seconds, outcome.store.requests, sorted(training.states), len(outcome.results))
        )
    assert traces[0] == traces[1]
    assert traces[0][3] > 3
