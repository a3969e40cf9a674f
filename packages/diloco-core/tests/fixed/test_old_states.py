"""No single damaged object of a published state ends a fixed run, whichever fragment it belongs to,
whenever the run stops.
"""

import copy

import pytest
from damage_lab import flip
from keys_lab import keys_of, newest
from strict_lab import Generations, Run
from training_lab import identical


def published(run, copies=False, **wanted):
    return keys_of(newest(run.store.objects), "state", copy=copies, **wanted)


@pytest.fixture(params=[Run, Generations], ids=["deciding", "overwriting"])
def make(request):
    """Makes runs in both kinds of stores."""
    return request.param


def survives(run, fragments, at_least):
    """Damage one object after the other, and go on without it.

    Returns the outer steps from which the run went on.
    """
    steps = set()
    for key in published(run):
        again = type(run)(2, fragments, syncs=at_least + 2, store=copy.deepcopy(run.store))
        again.incarnations = run.incarnations
        again.store.objects[key] = flip(again.store.objects[key], 4 * len(run.store.objects[key]))
        seen = {}
        assert identical(again.live(resume="newest-whole", seen=seen)), key
        steps |= {committed for committed, _, _ in seen.values()}
    return steps


@pytest.mark.parametrize("fragments", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_of_a_run_that_ended_in_order(make, fragments):
    run, syncs = make(2, fragments), 3 * fragments
    run.live(until=syncs)
    # The newest of any fragment may be the one that is damaged: then the syncs since then are given
    # up, too.
    assert survives(run, fragments, syncs) <= set(range(syncs - fragments, syncs + 1))
    run.live(resume=True, until=syncs + 1)
    assert survives(run, fragments, syncs + 1) <= set(range(syncs + 1 - fragments, syncs + 2))


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize(
    "operation",
    [150, *(pytest.param(at, marks=pytest.mark.slow) for at in range(140, 190) if at != 150)],
)
def test_of_a_run_that_was_killed_in_the_middle_of_a_sync(make, fragments, operation):
    run = make(2, fragments)
    run.live((0, operation, "kill before"), (1, operation - 2, "kill before"), until=40)
    assert len(published(run)) >= 2 * (fragments + 1)
    survives(run, fragments, 10)
