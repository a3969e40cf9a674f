"""Many replicas, many syncs: a sync costs what the model says, and the store does not grow."""

import itertools

import pytest
from simulated import (
    Schedule,
    SimulatedStore,
    SimulatedTraining,
    broken_promises,
    simulate,
    violations,
)

from diloco_core import Elastic


class Measured(SimulatedTraining):
    """Takes the store's counters at every sync of rank 0."""

    def __call__(self, node):
        store, add = self.store, self.samples.append
        reports = self.reports.setdefault((node.rank, node.incarnation), [])

        class Samples(list):
            def append(self, report):
                super().append(report)
                if node.rank == 0:
                    payload = sum(
                        len(data)
                        for key, data in store.objects.items()
                        if not key.startswith("commits/")
                    )
                    objects = sum(not key.startswith("commits/") for key in store.objects)
                    add(
                        (
                            sum(store.requests.values()),
                            sum(store.sent.values()),
                            sum(store.received.values()),
                            payload,
                            objects,
                        )
                    )

        self.reports[node.rank, node.incarnation] = Samples(reports)
        return super().__call__(node)


def _run(replicas, syncs, topology, elements):
    training, store, broken = (
        Measured(syncs=syncs, sizes=(elements,), sync_every=1),
        SimulatedStore(),
        [],
    )
    training.samples, training.store = [], store
    deletions = itertools.count()

    def check(keys):
        # Every check reads the whole log: in a long run, one deletion out of many is checked.
        if next(deletions) % max(1, syncs // 40) == 0:
            broken.extend(broken_promises(store, keys))

    store.after_delete = check
    outcome = simulate(
        training,
        Schedule(replicas),
        Elastic(replicas // 2, grace=30.0, topology=topology),
        store=store,
        limit=1e7,
    )
    assert violations(outcome, training) == []
    assert broken == []
    return training.samples


def _rate(samples, first, last, what):
    return (samples[last][what] - samples[first][what]) / (last - first)


SHAPES = [
    pytest.param(8, 40, "sharded", 16384, id="8x40 sharded"),
    pytest.param(8, 40, "gather", 16384, id="8x40 gather"),
    pytest.param(64, 50, "sharded", 65536, id="64x50 sharded", marks=pytest.mark.slow),
    pytest.param(8, 1000, "sharded", 16384, id="8x1000 sharded", marks=pytest.mark.slow),
    pytest.param(8, 300, "gather", 16384, id="8x300 gather", marks=pytest.mark.slow),
]


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
    if topology == "sharded":
        assert (1 + 2 / replicas) * least <= sent < 1 + 2 / replicas + 0.2
        assert 2 * others / replicas * least <= received < 2 * others / replicas + 0.1
        assert 2 * others * least <= requests < 2 * others + 24
    else:
        assert (1 + 2 / replicas / 4) * least <= sent < 1 + 2 / replicas / 4 + 0.2
        assert others * least <= received < others + 0.1
        assert (
            others * least <= requests < others + 24
        )  # every contribution is read once, whatever the number of shards

    # The store holds a few syncs, however long the run. (When the last sample is taken, others are
    # leaving and save what belongs to them alone.)
    payload, objects = ([sample[what] for sample in samples[:-1]] for what in (3, 4))
    assert max(payload[half:]) < 1.05 * max(payload[:half])
    assert max(objects[half:]) <= 1.05 * max(objects[:half])
    kept = 6 if topology == "sharded" else 16
    assert max(payload) < (kept * replicas + 12) * 1.3 * delta
