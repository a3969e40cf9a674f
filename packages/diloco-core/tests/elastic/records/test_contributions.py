"""The file of a contribution is read under its own key only."""

from dataclasses import replace

import pytest
import torch
from damage_lab import InMemory
from simulated import Schedule, SimulatedStore, SimulatedTraining, simulate, violations

from diloco_core import CorruptedObjectError, Elastic
from diloco_core._arithmetic._layout import CHUNK_BYTES
from diloco_core._run._records._keys import Delta
from diloco_core._wire._delta import DeltaFormat


class Contribution:
    """One with norms and two shards of the same size, weighed by its tokens."""

    def __init__(self):
        training = SimulatedTraining(syncs=2, sizes=(640,), clip=True, weight="tokens")
        store, settings = SimulatedStore(), Elastic(2, grace=5.0, topology="sharded")
        assert violations(simulate(training, Schedule(2), settings, store=store), training) == []
        (self.fragment,) = training.fragments
        key = next(key for key in store.contents if Delta.parse(key))
        self.delta, self.data = Delta.parse(key), store.contents[key]
        self.format = DeltaFormat(self.fragment)

    def reader(self, delta):
        return self.format.reader(delta, range(2), "x", lambda _: InMemory(self.data, "x"))

    def read(self, reader, shard):
        for chunk in self.fragment.layout.chunks(shard, CHUNK_BYTES):
            reader.read(torch.empty(chunk.numel))
        reader.verify(shard)


@pytest.fixture(scope="module")
def contribution():
    return Contribution()


def test_it_is_read_under_its_own_key(contribution):
    reader = contribution.reader(contribution.delta)
    assert len(reader.norms()) == 1
    for shard in (0, 1):
        contribution.read(reader, shard)


@pytest.mark.parametrize(
    "other",
    [
        {"sync": 9},
        {"rank": 7},
        {"epoch": 9},
        {"start": 1},
        {"stop": 99},
        {"tokens": 99},
        {"rate": 16 * "1"},
        {"base": 16 * "0"},
        {"schema": 16 * "0"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_not_under_another(contribution, other):
    delta = replace(contribution.delta, **other)
    assert delta != contribution.delta
    with pytest.raises(CorruptedObjectError, match="section norms"):
        contribution.reader(delta).norms()
    reader = contribution.reader(delta)
    with pytest.raises(CorruptedObjectError, match=r"section shard\.0"):
        contribution.read(reader, 0)
