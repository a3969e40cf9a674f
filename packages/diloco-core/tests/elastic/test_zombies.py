"""An incarnation that sleeps, is replaced and wakes up changes nothing that is not its own,
wherever it falls asleep.
"""

import pytest
from simulated import (
    Fault,
    Schedule,
    SimulatedStore,
    SimulatedTraining,
    broken_promises,
    flawless,
    simulate,
    violations,
)

from diloco_core import Elastic, FencedError
from diloco_core._run._records._keys import inner_key, parse_inner


class Guarded(SimulatedStore):
    """Notes what incarnations do to the inner state of their successors."""

    __slots__ = ("stolen",)

    def __init__(self):
        super().__init__()
        self.stolen = []

    def by(self, epoch, keys):
        for key in keys:
            written = parse_inner(key)
            if written is not None and written[0] > epoch:
                self.stolen.append(key)


def _wrong(operation, seconds, topology="sharded"):
    """What goes wrong where rank 1 sleeps in one operation, its second incarnation dies, and a
    third goes on.
    """

    def train(node):
        real = node.connection.delete

        def delete(keys, **options):
            keys = list(keys)
            store.by(node.exchange.epoch, keys)
            real(keys, **options)

        node.connection.delete = delete
        return training(node)

    training, store, broken = SimulatedTraining(syncs=9, sizes=(40,), save_every=1), Guarded(), []
    store.after_delete = lambda keys: broken.extend(broken_promises(store, keys))
    faults = [Fault(1, 1, operation, "zombie", seconds), Fault(1, 2, 75, "kill before")]
    schedule = Schedule(3, faults=faults, restart_after=0.5, latency=0.01)
    outcome = simulate(train, schedule, Elastic(2, grace=3.0, topology=topology), store=store)
    return violations(outcome, training) + broken + store.stolen


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


def test_nothing_is_saved_after_the_counter_jumped(caplog):
    """Steps of an earlier incarnation are counted that this one never took: its loader does not
    stand where they end.
    """
    overtaken = 0
    for operation in range(30, 46):
        # As in test_elastic_cases: incarnation 1 carries more steps than incarnation 2 has taken
        # when they are counted.
        training = Saves(syncs=8, sizes=(40,), pauses={(1, 1): 7.0})
        training.saved = set()
        schedule = Schedule(
            3, faults=[Fault(1, 1, operation, "zombie", 1.5)], restart_after=0.1, latency=0.01
        )
        flawless(training, schedule, Elastic(2, grace=5.0))
        assert (0, 1) in training.saved
        steps = sorted(
            step for rank, incarnation, step in training.batches if (rank, incarnation) == (1, 2)
        )
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


@pytest.mark.parametrize("operation", ["get", "put", "list", "delete"])
def test_it_wakes_up_in_the_middle_of_saving(operation):
    """Rank 0's first incarnation sleeps in its third save; the second one saves meanwhile, and a
    third takes that over.
    """
    store, saves, slept = Guarded(), [], []

    def prepare(node):
        save = node.exchange.save_inner
        node.before("delete", lambda keys: store.by(node.exchange.epoch, keys))

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
