"""Plain means over fixed membership: they keep nothing but the last two, and nobody comes back to
them.
"""

import pytest
import torch
from training_lab import run

from diloco_core import ConfigurationError, ObjectStoreAllReduce, StoreExchange, Timing
from diloco_core._store._open import open_store

LIMITS = Timing(join_timeout=60.0, sync_timeout=60.0, beat_interval=10.0, lost_after=600.0)
RANKS = 3


def exchanges(folder, **options):
    store = str(folder)
    return [
        StoreExchange(open_store(store), rank, RANKS, timing=LIMITS, **options)
        for rank in range(RANKS)
    ]


def means(exchange):
    found = []
    with ObjectStoreAllReduce(exchange) as reduce:
        for number in range(5):
            tensors = [torch.full((7 + number,), float(exchange.rank + number)), torch.arange(5.0)]
            tensors[1] *= exchange.rank
            found.append((reduce.mean(tensors).sync, tensors))
    return found


def test_every_rank_has_the_mean_in_place_of_its_tensors(tmp_path):
    for found in run(means, exchanges(tmp_path / "run")):
        for number, (sync, (first, second)) in enumerate(found):
            assert sync == number
            assert torch.equal(first, torch.full((7 + number,), 1.0 + number))
            assert torch.equal(second, torch.arange(5.0))


def test_they_are_not_resumed(tmp_path):
    with pytest.raises(ConfigurationError, match="resume= cannot be used for means"):
        means(exchanges(tmp_path / "run", resume=True)[0])
