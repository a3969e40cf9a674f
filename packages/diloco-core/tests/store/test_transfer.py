"""Connections, block size and memory: what cannot work is refused, and the rest is obeyed."""

import resource
from dataclasses import replace

import numpy as np
import pytest
import torch

from diloco_core import ConfigurationError, DiLoCo, Elastic, StoreExchange, Transfer, connect
from diloco_core._store._api import block_bytes_of
from diloco_core._store._open import open_store
from diloco_core._store._transfer import creates_at_once, parts_at_once
from diloco_core.testing import run_replicas

MIB = 2**20


@pytest.fixture
def files(monkeypatch):
    """A process that may have 1,000 file descriptors."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 2000))


@pytest.mark.parametrize("name", ["connections", "block_bytes", "budget_bytes"])
def test_only_whole_numbers_from_one_on(name):
    for value in (0, -1, True, 1.5, 8.0, "8", None, float("nan")):
        with pytest.raises(
            ConfigurationError, match=f"{name} must be a whole number of at least 1"
        ):
            Transfer(**{name: value})
    assert Transfer(np.int16(8), np.int32(MIB), np.int64(30 * MIB)) == Transfer(8, MIB, 30 * MIB)
    assert type(Transfer(np.int16(8)).connections) is int


@pytest.mark.parametrize(
    ("settings", "text", "works"),
    [
        ({"block_bytes": 2**16 - 1}, "at least 65536 .* not 65535", {"block_bytes": 2**16}),
        ({"budget_bytes": 16 * MIB - 1}, "at least 16777216.*smaller", {"budget_bytes": 16 * MIB}),
        ({"block_bytes": 41 * MIB}, "least 85983232, not 83886080", {"block_bytes": 40 * MIB}),
        (
            {"connections": 4, "block_bytes": MIB, "budget_bytes": MIB},
            r"at least 10485760, not 1048576.*two parts .*\)\.$",
            {"budget_bytes": 10 * MIB},
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(settings, text, works):
    with pytest.raises(ConfigurationError, match=text):
        Transfer(**settings)
    Transfer(**{**settings, **works})


def test_no_more_connections_than_file_descriptors(files, monkeypatch):
    many = Transfer(501)
    with pytest.raises(ConfigurationError, match=r"connections must be at most 500.*ulimit"):
        many.check()
    replace(many, connections=500).check()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    Transfer(10**6).check()


def test_few_connections_and_little_memory_still_move():
    least = Transfer(1, 2**16, 10 * MIB)
    assert parts_at_once(least, 10 * MIB) == parts_at_once(least, 0, 2) == 1
    assert creates_at_once(least) == 1
    assert least.gather_budget() >= least.gather_block()


def test_they_are_obeyed(small_s3, small_s3_drivers, remote):
    store = remote(small_s3_drivers["obstore"], transfer=Transfer(3, 2**16, 30 * MIB))
    small_s3.objects["run/k"] = bytes(2**18)
    small_s3.log.clear()
    with store.open("k", 2**18) as reader:
        reader.expect(0, 2**18)
        reader.read_into(0, memoryview(bytearray(2**18)))
    assert [method for method, _ in small_s3.log] == ["GET"] * 4
    assert store.background._executor._max_workers == 3
    assert (store.background.budget, block_bytes_of(store)) == (30 * MIB, 2**16)


def test_gather_takes_less_of_them(small_s3, small_s3_drivers, remote):
    """Half of a block at a time, since all contributions are read at once."""
    transfer = Transfer(4, 2 * MIB, 40 * MIB)
    stores = [remote(small_s3_drivers["obstore"], transfer=transfer) for _ in range(2)]

    def replica(exchange):
        model = torch.nn.Linear(1024, 1024, bias=False)  # 4 MiB
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"sync_every": 1, "save_inner_every": 0, "on_sync": seen}
        with DiLoCo(model, inner, exchange, **options):
            model(torch.ones(1024)).sum().backward()
            small_s3.largest = 0
            inner.step()

    def seen(report):
        largest.append(small_s3.largest)

    elastic, largest = Elastic(2, topology="gather"), []
    run_replicas(replica, [StoreExchange(store, r, 2, elastic) for r, store in enumerate(stores)])
    assert [store.background.budget for store in stores] == [12 * MIB] * 2
    assert all(MIB <= size < 1.01 * MIB for size in largest), largest


@pytest.mark.parametrize("options", [{}, {"min_replicas": 1}])
def test_connect_hands_them_on(options):
    transfer = Transfer(connections=5)
    exchange = connect("memory://transfer/run", rank=0, world_size=1, transfer=transfer, **options)
    assert exchange.store.background.settings == transfer
    exchange.leave()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_folders_have_no_use_for_them(tmp_path, scheme):
    place = {"uri": f"{scheme}{tmp_path}/run", "rank": 0, "world_size": 1}
    with pytest.raises(ConfigurationError, match=r"transfer=Transfer\(connections=5, .* a folder"):
        connect(**place, transfer=Transfer(connections=5))
    assert not (tmp_path / "run").exists()
    exchange = connect(**place, transfer=Transfer())
    for store in (exchange.store, open_store("memory://transfer/near")):
        assert block_bytes_of(store) == 0
    exchange.leave()
