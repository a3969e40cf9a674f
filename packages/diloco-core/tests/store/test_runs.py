"""Whole runs over S3: with either driver the bytes of a folder, and nothing left running."""

import itertools
import threading

import pytest
import torch
from training_lab import fill, identical, train

from diloco_core import ConfigurationError, Elastic, ObjectStoreAllReduce, StoreExchange
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas

REPLICAS = 3
_prefixes = itertools.count()


def run(stores, outer_steps=3):
    """Return what the replicas hold after some outer steps; all the same."""
    exchanges = [StoreExchange(store, r, len(stores)) for r, store in enumerate(stores)]
    results = train(lambda rank: fill(torch.nn.Linear(120, 120)), exchanges, 2 * outer_steps)
    assert identical(results)
    return results[0]


def run_in_folder(folder, replicas, outer_steps=3):
    """Return what the same run comes to over a local folder."""
    return run([open_store(str(folder)) for _ in range(replicas)], outer_steps)


@pytest.mark.parametrize("scheme", ["obstore+s3", "fsspec+s3"])
def test_over_moto(moto_url, point_at, tmp_path, scheme):
    expected = run_in_folder(tmp_path, 2, outer_steps=2)
    point_at(moto_url)
    before = threading.enumerate()  # some of other tests may still be about to end
    uri = f"{scheme}://bucket/whole-{next(_prefixes)}"
    stores = [open_store(uri) for _ in range(2)]
    assert identical([run(stores, outer_steps=2), expected])
    left = stores[0].list("")
    assert "manifest.json" in left
    assert not [key for key in left if key.startswith("probes/")]
    started = [one for one in threading.enumerate() if one not in before]
    assert not [one for one in started if one.name.startswith("diloco-repeat")]


def test_over_a_store_that_fails_every_now_and_then(small_s3, driver, remote, tmp_path):
    expected = run_in_folder(tmp_path, REPLICAS)
    stores = [remote(driver, patience=1e9) for _ in range(REPLICAS)]
    small_s3.disturb(every=5, kinds=[500, "lose", 503, "drop", "cut"])
    assert identical([run(stores), expected])
    assert small_s3.disturbed > 20


def test_no_byte_is_fetched_twice(small_s3, driver, remote):
    """A replica reads 2 (N-1)/N of the tensor, and at most 64 KiB more for each object."""
    size = 4 * 1_500_000

    def mean(exchange):
        tensor = torch.full((size // 4,), float(exchange.rank))
        with ObjectStoreAllReduce(exchange) as reduce:
            report = reduce.mean([tensor])
        assert (tensor == 1.0).all()
        return report

    exchanges = [StoreExchange(remote(driver), rank, REPLICAS) for rank in range(REPLICAS)]
    small_s3.served = 0
    reports = run_replicas(mean, exchanges)
    wanted = 2 * size * (REPLICAS - 1) / REPLICAS
    assert all(wanted <= report.bytes_received <= wanted + 1000 for report in reports)
    opened = REPLICAS * 2 * (REPLICAS - 1)
    assert REPLICAS * wanted <= small_s3.served <= REPLICAS * wanted + opened * 2**16 + 200_000


def test_a_fragment_that_no_object_could_hold_is_refused(s3, tmp_path):
    forty_billion = 4 * 40 * 10**9
    for exchange in (StoreExchange(s3, 0, 8), StoreExchange(s3, 0, 8, Elastic(4))):
        with pytest.raises(ConfigurationError, match=r"160 GB is .* 52 GB: cut it into 4 frag"):
            exchange.shards(forty_billion)
        assert exchange.shards(forty_billion // 4) >= 8
    for near in (str(tmp_path), "memory://large/run"):
        assert StoreExchange(open_store(near), 0, 8).shards(forty_billion) >= 8
