"""Adopting the shards of other owners: what is damaged is read again, and its owner is asked once to write it again."""

import logging

import pytest
import torch

from diloco_core import CorruptedObjectError, Timing
from diloco_core._arithmetic._layout import Rule
from diloco_core._arithmetic._sharded import Scratch
from diloco_core._exchange._traffic import Traffic
from diloco_core._model._partition import NamedTensor
from diloco_core._outer._fragment import Fragment
from diloco_core._outer._optimizer import OuterOptimizer, outer_factory
from diloco_core._store._open import open_store
from diloco_core._store._patient import Patient
from diloco_core._strict._participant import Participant
from diloco_core._strict._records._repairs import Repairs
from diloco_core._strict._sync._adopt import Adoption
from diloco_core._strict._sync._objects import SyncObjects
from diloco_core._strict._sync._published import OwnShards
from diloco_core._wire._published import Shard


class Side:
    """One of two replicas in sync 0, which owns one of two shards."""

    def __init__(self, store, rank, value):
        weight = NamedTensor("weight", torch.nn.Parameter(torch.full((64,), value)), Rule.OUTER)
        outer = OuterOptimizer(outer_factory(None, 0.5, 0.0, False))
        self.job = Fragment("0", [weight], outer, 2)
        self.job.take_snapshot()
        self.job.begin()
        timing = Timing(sleep=lambda seconds: None)
        self.store = Patient(store, timing)
        participant = Participant(
            self.store, rank, 2, 32 * "a", timing, None, 64, Scratch(64), lambda: None, lambda: None
        )
        objects = SyncObjects(participant, 0, self.job)
        repairs = Repairs(self.store, rank, 0)
        self.key = objects.state_key(rank)
        self.own_shards = OwnShards(self.store, objects, repairs, Traffic())
        self.adoption = Adoption(participant, self.job.layout, objects, repairs, Traffic())


@pytest.fixture
def sides(tmp_path, request):
    """Rank 1 has published its shard, of twos; rank 0 has to adopt it."""
    far_away = request.param == "far away"
    store = open_store(f"memory://{tmp_path}" if far_away else str(tmp_path / "run"))
    if far_away:
        store.near = False  # objects are opened ahead
    waits, owner = Side(store, 0, 1.0), Side(store, 1, 2.0)
    owner.own_shards.publish(1)
    yield waits, owner
    store.close()


@pytest.mark.parametrize("sides", ["folder", "far away"], indirect=True)
def test_the_owner_is_asked_once_and_the_shard_is_not_read_until_it_has_written(sides, caplog):
    waits, owner = sides
    whole = owner.store.get(owner.key)
    owner.store.put(owner.key, lambda: [bytes(len(whole))])
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert not waits.adoption.adopt_published()
    assert [record.getMessage().startswith("a shard is damaged") for record in caplog.records] == [
        True
    ]
    owner.own_shards.repair()
    assert owner.store.get(owner.key) == whole
    assert waits.adoption.adopt_published()
    assert waits.adoption.pending == []
    assert waits.job.copy[0].tolist() == [1.0] * 32 + [2.0] * 32
    assert waits.store.list("requests/") == {}


@pytest.mark.parametrize("sides", ["folder", "far away"], indirect=True)
def test_what_was_damaged_on_its_way_is_read_with_another_reader(sides, monkeypatch):
    waits, _ = sides
    adopt, readers = Shard.adopt, []

    def damaged_once(self, reader, origin, scratch):
        readers.append(reader)
        if len(readers) == 1:
            raise CorruptedObjectError("a bit has flipped")
        return adopt(self, reader, origin, scratch)

    monkeypatch.setattr(Shard, "adopt", damaged_once)
    assert waits.adoption.adopt_published()
    assert len(readers) == 2
    assert readers[0] is not readers[1], "the first one may have fetched the wrong bytes ahead"
    assert waits.store.list("requests/") == {}
