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


def run(stores):
    """Return what the replicas hold after three outer steps; all the same."""
    exchanges = [StoreExchange(store, r, REPLICAS) for r, store in enumerate(stores)]
    results = train(lambda rank: fill(torch.nn.Linear(120, 120)), exchanges, steps=6)
    assert identical(results)
    return results[0]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The result over a local folder."""
    folder = str(tmp_path_factory.mktemp("expected"))
    return run([open_store(folder) for _ in range(REPLICAS)])


@pytest.mark.parametrize("scheme", ["obstore+s3", "fsspec+s3"])
def test_over_moto(moto_url, point_at, expected, scheme):
    point_at(moto_url)
    before = threading.enumerate()  # some of other tests may still be about to end
    uri = f"{scheme}://bucket/whole-{next(_prefixes)}"
    stores = [open_store(uri) for _ in range(REPLICAS)]
    assert identical([run(stores), expected])
    left = stores[0].list("")
    assert "manifest.json" in left
    assert not [key for key in left if key.startswith("probes/")]
    started = [one for one in threading.enumerate() if one not in before]
    assert not [one for one in started if one.name.startswith("diloco-repeat")]


def test_over_a_store_that_fails_every_now_and_then(small_s3, driver, remote, expected):
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
