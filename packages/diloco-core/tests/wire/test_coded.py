"""Published shards whose updates are encoded: every bit of them is covered, and they are not taken
for one another.
"""

from types import SimpleNamespace

import pytest
from damage_lab import InMemory, flip
from simulated import Schedule, SimulatedStore, SimulatedTraining, simulate, violations

from diloco_core import CorruptedObjectError, Elastic
from diloco_core._arithmetic._layout import CHUNK_BYTES
from diloco_core._arithmetic._sharded import Scratch
from diloco_core._run._incarnation._progress import published_shard
from diloco_core._run._records._keys import MANIFEST, shard_key
from diloco_core._run._records._manifest import Manifest

CHANGE, WHOLE = 3, 4  # of every second sync, all values are published


@pytest.fixture(scope="module")
def run():
    """What was published of a run, and how it is read."""
    training = SimulatedTraining(syncs=4, sizes=(300,), state_codec="int8", full_state_every=2)
    store = SimulatedStore()
    outcome = simulate(
        training, Schedule(2), Elastic(2, grace=5.0, topology="sharded"), store=store
    )
    assert violations(outcome, training) == []
    manifest, (fragment,) = (
        Manifest.from_json(store.decided[MANIFEST], MANIFEST),
        training.fragments,
    )

    def published(sync, number):
        return store.contents[shard_key(sync, 0, number, manifest.initial)]

    def check(sync, number, data):
        shard = published_shard(fragment, sync, number, manifest.run(), CHUNK_BYTES)
        return shard.check(InMemory(data, "x"), "x", Scratch(CHUNK_BYTES), whole=True)

    return SimpleNamespace(published=published, check=check, shards=range(fragment.layout.shards))


@pytest.mark.parametrize("step", [31, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sync", [CHANGE, WHOLE])
def test_every_bit_is_covered(run, sync, step):
    for number in run.shards:
        data = run.published(sync, number)
        assert run.check(sync, number, data)
        for bit in range(0, 8 * len(data), step):
            with pytest.raises(CorruptedObjectError):
                run.check(sync, number, flip(data, bit))
        for size in range(0, len(data), step):
            with pytest.raises(CorruptedObjectError):
                run.check(sync, number, data[:size])


@pytest.mark.parametrize(("sync", "other"), [(CHANGE, 1), (WHOLE, 2)])
def test_that_of_another_sync_is_refused(run, sync, other):
    for number in run.shards:
        data = run.published(other, number)
        assert len(data) == len(run.published(sync, number))
        with pytest.raises(CorruptedObjectError):
            run.check(sync, number, data)
