"""Many replicas, many syncs: a sync costs what the model says, and the store does not grow."""

import itertools

import pytest
from simulated import Schedule, SimulatedStore, SimulatedTraining, broken_promises, flawless

from diloco_core import Elastic


class Measured(SimulatedTraining):
    """Takes the store's counters at every sync of rank 0: requests, bytes sent and received, bytes
    and objects held.
    """

    def __call__(self, node):
        store, samples = self.store, self.samples

        class Reports(list):
            def append(self, report):
                super().append(report)
                contents = [data for key, data in store.objects.items() if key[:8] != "commits/"]
                counters = (store.requests, store.sent, store.received)
                totals = [sum(counter.values()) for counter in counters]
                samples.append((*totals, sum(map(len, contents)), len(contents)))

        if node.rank == 0:
            self.reports[node.rank, node.incarnation] = Reports()
        return super().__call__(node)


def _run(replicas, syncs, topology, elements):
    training, store, broken = Measured(syncs, (elements,), 1), SimulatedStore(), []
    training.samples, training.store = [], store
    deletions = itertools.count()

    def check(keys):
        # Every check reads the whole log: in a long run, one deletion out of many is checked.
        if next(deletions) % max(1, syncs // 40) == 0:
            broken.extend(broken_promises(store, keys))

    store.after_delete = check
    settings = Elastic(replicas // 2, grace=30.0, topology=topology)
    flawless(training, Schedule(replicas), settings, store=store, limit=10000000.0)
    assert broken == []
    return training.samples


def _rate(samples, first, last, what):
    return (samples[last][what] - samples[first][what]) / (last - first)


SHAPES = [
    pytest.param(8, 26, "sharded", 16384, id="8x26 sharded"),
    pytest.param(8, 26, "gather", 16384, id="8x26 gather"),
    pytest.param(64, 50, "sharded", 65536, id="64x50 sharded", marks=pytest.mark.slow),
    pytest.param(8, 1000, "sharded", 16384, id="8x1000 sharded", marks=pytest.mark.slow),
    pytest.param(8, 300, "gather", 16384, id="8x300 gather", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "syncs", "topology", "elements"), SHAPES)
def test_costs_are_flat_and_as_modelled(replicas, syncs, topology, elements):
    samples = _run(replicas, syncs, topology, elements)
    assert len(samples) == syncs
    quarter, end = 8, 8 + (syncs - 10) // 8 * 8
    half = (quarter + end) // 2
    delta, others = 4.0 * elements, replicas - 1

    # Flat: the second half costs what the first one costs.
    near = 0.2 if syncs < 100 else 0.03  # a sample may fall on either side of somebody's upload
    for what in range(3):
        before, after = _rate(samples, quarter, half, what), _rate(samples, half, end, what)
        assert after == pytest.approx(before, rel=near)
    least = 1 - near / 4

    # As modelled: one contribution up, and the own shard with its momentum; the headers are what
    # small models add.
    requests = _rate(samples, quarter, end, 0) / replicas
    sent = _rate(samples, quarter, end, 1) / replicas / delta
    received = _rate(samples, quarter, end, 2) / replicas / delta
    sharded = topology == "sharded"
    up = 1 + 2 / replicas / (1 if sharded else 4)
    down = 2 * others / replicas if sharded else others
    # With gather every contribution is read once, whatever the number of shards.
    objects = 2 * others if sharded else others
    assert up * least <= sent < up + 0.2
    assert down * least <= received < down + 0.1
    assert objects * least <= requests < objects + 24

    # The store holds a few syncs, however long the run. (When the last sample is taken, others are
    # leaving and save what belongs to them alone.)
    payload, objects = ([sample[what] for sample in samples[:-1]] for what in (3, 4))
    assert max(payload[half:]) < 1.05 * max(payload[:half])
    assert max(objects[half:]) <= 1.05 * max(objects[:half])
    kept = 6 if topology == "sharded" else 16
    assert max(payload) < (kept * replicas + 12) * 1.3 * delta
