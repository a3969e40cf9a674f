"""Adopting the shards of other owners: what is damaged is read again, and its owner is asked once to write it again."""

import logging

import keys_lab
import pytest
from damage_lab import InMemory, late_bit
from strict_lab import Means
from training_lab import identical

from diloco_core.testing import SimulatedStore

SHARD = keys_lab.of("state", sync=1, rank=1)


class Rotten(SimulatedStore):
    """A store in which the first version of rank 1's shard of sync 1 is damaged."""

    def __init__(self):
        super().__init__()
        self.versions = []

    def write(self, key, data):
        if SHARD(key):
            self.versions.append(data)
            data = late_bit(data) if len(self.versions) == 1 else data
        super().write(key, data)


@pytest.mark.parametrize("near", [False, True], ids=["far away", "near"])
def test_the_owner_is_asked_once_and_the_shard_is_not_read_until_it_has_written(
    caplog, monkeypatch, near
):
    """Rank 1 rests when it has adopted the shard of rank 0, and writes its own one again in the next sync."""
    monkeypatch.setattr("diloco_core.testing._connection.Connection.near", near)
    run, read, asked = Means(2, store=Rotten()), [], []

    def before(process, kind, key):
        if process.rank == 1 and keys_lab.of("contribution", sync=2)(key):
            process.sleep(50.0)
        if process.rank == 0:
            read.extend([len(run.store.versions)] if SHARD(key) and kind == "open" else [])
            asked.extend([key] if keys_lab.of("request")(key) and kind == "put" else [])

    run.before = before
    with caplog.at_level(logging.ERROR):
        assert identical([*run.live(until=3), *Means(2).live(until=3)])
    said = [text for text in caplog.messages if text.startswith("a shard is damaged")]
    assert len(said) == len(asked) == 1
    assert read.count(2) == 1, "of the second version"
    assert read.count(1) <= 5, "when the shard was found, and when it was read again"
    first, second = run.store.versions
    assert first == second
    assert not keys_lab.keys_of(run.store.objects, "request")


class Once:
    """Opens the shard of rank 1 so that all is damaged which the first reader reads."""

    def __init__(self, process):
        self.process, self.opened, open_it = process, 0, process.open

        def harmed(key, size=None):
            if not SHARD(key):
                return open_it(key, size)
            self.opened += 1
            if self.opened > 1:
                return open_it(key, size)
            return InMemory(late_bit(process.get(key, 10**6)), key)

        process.open = harmed


@pytest.mark.parametrize("near", [False, True], ids=["far away", "near"])
def test_what_was_damaged_on_its_way_is_read_with_another_reader(caplog, monkeypatch, near):
    """The first one may have fetched the wrong bytes ahead."""
    monkeypatch.setattr("diloco_core.testing._connection.Connection.near", near)
    run, readers = Means(2), []

    def before(process, kind, key):
        if process.rank == 0 and not readers:
            readers.append(Once(process))
        assert not keys_lab.of("request")(key)

    run.before = before
    assert identical([*run.live(until=3), *Means(2).live(until=3)])
    assert readers[0].opened == 2
    assert "a shard is damaged" not in caplog.text
