"""An incarnation that sleeps, is replaced and wakes up changes nothing that is not its own."""

import pytest
from simulated import (
    CheckedStore,
    Fault,
    Schedule,
    SimulatedTraining,
    flawless,
    simulate,
    violations,
)

from diloco_core import Elastic, FencedError
from diloco_core._run._records._keys import inner_key, parse_inner


class Guarded(CheckedStore):
    """Notes what incarnations do to the inner state of their successors."""

    def __init__(self):
        super().__init__()
        self.stolen = []

    def guard(self, node):
        def look(keys):
            later = [key for key in keys if (parse_inner(key) or (0,))[0] > node.exchange.epoch]
            self.stolen.extend(later)

        node.before("delete", look)


def _wrong(operation, seconds, topology="sharded"):
    """Return what goes wrong if rank 1 sleeps, its second incarnation dies, and a third goes on."""
    training, store = SimulatedTraining(syncs=9, sizes=(40,), save_every=1), Guarded()
    faults = [Fault(1, 1, operation, "zombie", seconds), Fault(1, 2, 75, "kill before")]
    schedule = Schedule(3, faults=faults, restart_after=0.5, latency=0.01)
    settings, options = Elastic(2, grace=3.0, topology=topology), {"prepare": store.guard}
    outcome = simulate(training, schedule, settings, store=store, **options)
    return violations(outcome, training) + store.stolen


@pytest.mark.sampled
@pytest.mark.parametrize("topology", ["sharded", "gather"])
@pytest.mark.parametrize("seconds", [2.0, 12.0])
def test_wherever_an_incarnation_sleeps(topology, seconds):
    # In three saves and between them; the slow test tries every operation.
    assert [_wrong(operation, seconds, topology) for operation in range(29, 70, 9)] == [[]] * 5


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["sharded", "gather"])
@pytest.mark.parametrize("seconds", [0.3, 1.0, 2.0, 5.0, 12.0, 30.0])
def test_wherever_and_however_long_an_incarnation_sleeps(topology, seconds):
    assert [_wrong(operation, seconds, topology) for operation in range(5, 120)] == [[]] * 115


class Saves(SimulatedTraining):
    """Remembers which incarnations saved their inner state."""

    def __call__(self, node):
        save = node.exchange.save_inner

        def watched(parts):
            self.saved.add((node.rank, node.incarnation))
            save(parts)

        node.exchange.save_inner = watched
        return super().__call__(node)


@pytest.mark.slow
def test_nothing_is_saved_after_the_counter_jumped(caplog):
    """Its loader does not stand where the counted steps of the incarnation before it end."""
    overtaken = 0
    for operation in range(30, 46):
        # Incarnation 1 carries more steps than incarnation 2 has taken when they are counted.
        training = Saves(syncs=8, sizes=(40,), pauses={(1, 1): 7.0})
        training.saved = set()
        schedule = Schedule(
            3, faults=[Fault(1, 1, operation, "zombie", 1.5)], restart_after=0.1, latency=0.01
        )
        flawless(training, schedule, Elastic(2, grace=5.0))
        assert (0, 1) in training.saved
        steps = sorted(step for *who, step in training.batches if who == [1, 2])
        if steps != list(range(steps[0], steps[-1] + 1)):
            overtaken += 1
            assert (1, 2) not in training.saved
            (skipped,) = {report.batches_to_skip for report in training.reports[1, 2]} - {0}
            # A loader that counts by itself stands where the counted steps end.
            assert skipped == steps[-1] - steps[0] + 1 - len(steps)
            assert all(training.batches[1, 2, step] == step for step in steps)
        else:
            assert {report.batches_to_skip for report in training.reports[1, 2]} <= {0}
    assert overtaken
    assert "Skip the same number of batches" in caplog.text


@pytest.mark.sampled
@pytest.mark.parametrize("operation", ["get", "put", "list", "delete"])
def test_it_wakes_up_in_the_middle_of_saving(operation):
    """Rank 0's first incarnation sleeps in its third save; the second one saves meanwhile, and a
    third takes that over.
    """
    store, saves, slept = Guarded(), [], []

    def prepare(node):
        save = node.exchange.save_inner
        store.guard(node)

        def sleeps(_):
            if not slept:
                slept.append(operation)
                node.connection._replace()
                node.sleep(30.0)

        def sleepy_save(parts):
            saves.append(node.incarnation)
            if saves == [1, 1, 1]:
                node.before(operation, sleeps)
            return save(parts)

        node.exchange.save_inner = sleepy_save

    training = SimulatedTraining(syncs=12, sizes=(8,), save_every=1)
    schedule = Schedule(1, faults=[Fault(0, 2, 110, "kill before")], latency=0.01)
    outcome = flawless(training, schedule, Elastic(1, grace=3.0), store=store, prepare=prepare)
    assert isinstance(outcome.results[0, 1], FencedError)
    assert (0, 3) in outcome.results
    assert store.stolen == []
    saved = [key for key in store.objects if (parse_inner(key) or (0,))[0] > 1]
    assert saved == [inner_key(0, 3, 12)]
