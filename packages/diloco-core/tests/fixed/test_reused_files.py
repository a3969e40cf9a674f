"""In a folder, each rank of a fixed run writes over its own old files: fresh pages cost more than
the values in them.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from diloco_core import ObjectStoreAllReduce

LARGE = 2**16  # bytes; smaller files are not reused


def inodes(folder):
    stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return {stat.st_ino for stat in stats if stat.st_size >= LARGE}


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
