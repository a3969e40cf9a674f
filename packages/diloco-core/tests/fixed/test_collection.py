"""Test what a fixed run deletes, which nobody needs any more, and what it writes over."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from keys_lab import kept, keys_of, newest, of
from strict_lab import Means, Run, in_folder

from diloco_core import ObjectStoreAllReduce, export


def held_at_each_sync(run):
    """For each sync to be decided, those of contributions and of states in the store."""
    held = []

    def before(_, kind, key):
        if of("commit")(key) and kind in {"put", "create"}:
            keys = newest(run.store.objects)
            found = ({kept(each).sync for each in keys_of(keys, what)} for what in kinds)
            held.append((kept(key).sync, *map(sorted, found)))

    run.before, kinds = before, ("contribution", "state")
    return held


@pytest.mark.sampled
@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_the_store_holds_the_newest_states_of_each_fragment(new_store, fragments, tmp_path):
    run = Run(2, fragments, syncs=14, store=new_store())
    held = held_at_each_sync(run)
    run.live()
    steady = [entry for entry in held if entry[0] > 4 * fragments]
    assert steady
    for sync, deltas, states in steady:
        assert deltas == list(range(sync - fragments, sync + 1))
        assert states == list(range(sync - 2 * fragments, sync)), "two of each fragment"
    assert export(str(in_folder(run, tmp_path / "run")), tmp_path / "model") == 14


def test_of_means_only_the_last_two_are_there(new_store):
    run = Means(2, store=new_store())
    held = held_at_each_sync(run)
    run.live(until=8)
    assert {sync for sync, *_ in held} == set(range(1, 9))
    for sync, deltas, states in held:
        assert deltas == [1, *range(2, sync + 1)][-2:]
        assert states == list(range(max(sync - 2, 1), sync))


LARGE = 2**16  # bytes; smaller files are not reused


def inodes(folder):
    stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return {stat.st_ino for stat in stats if stat.st_size >= LARGE}


@pytest.mark.sampled
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_after_a_few_syncs_no_file_is_new(ranks, tmp_path):
    """Contributions of ranks differ a little in size, as the shards that are left out do."""
    exchanges = [
        ObjectStoreAllReduce(tmp_path, rank=rank, world_size=ranks) for rank in range(ranks)
    ]
    tensors = [torch.ones(100_003) for _ in range(ranks)]
    seen = []
    with ThreadPoolExecutor(ranks) as pool:
        for _ in range(12):
            list(pool.map(lambda rank: exchanges[rank].mean([tensors[rank]]), range(ranks)))
            seen.append(inodes(tmp_path))
        list(pool.map(ObjectStoreAllReduce.close, exchanges))
    assert set().union(*seen[6:]) <= set().union(*seen[:6])
    assert all(len(files) <= 2 * 3 * ranks for files in seen), "a rank keeps three of each kind"
