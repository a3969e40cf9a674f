"""Connections, block size and memory: what cannot work is refused, and the rest is obeyed."""

import resource
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from diloco_core import ConfigurationError, DiLoCo, Elastic, StoreExchange, Transfer, connect
from diloco_core._store import _transfer
from diloco_core._store._api import block_bytes_of
from diloco_core._store._drivers._fsspec import FsspecDriver
from diloco_core._store._drivers._remote import RemoteStore
from diloco_core._store._drivers._uploads import creates_at_once, parts_at_once
from diloco_core._store._open import open_store
from diloco_core._wire._inputs import Inputs

MIB = 2**20


@pytest.fixture
def files(monkeypatch):
    """A process that may have 1,000 file descriptors."""
    monkeypatch.setattr(_transfer, "most_files", lambda: 1000)


@pytest.mark.parametrize(
    ("name", "value"),
    list(
        product(
            ("connections", "block_bytes", "budget_bytes"),
            (0, -1, True, 1.5, 8.0, "8", None, float("nan")),
        )
    ),
)
def test_only_whole_numbers_from_one_on(name, value):
    with pytest.raises(
        ConfigurationError, match=rf"{name} must be a whole number of at least 1, not "
    ):
        Transfer(**{name: value})


def test_numbers_of_numpy_are_numbers():
    assert Transfer(np.int16(8), np.int32(MIB), np.int64(30 * MIB)) == Transfer(8, MIB, 30 * MIB)
    assert type(Transfer(np.int16(8)).connections) is int


@pytest.mark.parametrize(
    ("settings", "told", "works"),
    [
        (
            {"block_bytes": 2**16 - 1},
            r"block_bytes must be at least 65536 .* not 65535",
            {"block_bytes": 2**16},
        ),
        (
            {"budget_bytes": 16 * MIB - 1},
            r"budget_bytes must be at least 16777216.*smaller",
            {"budget_bytes": 16 * MIB},
        ),
        (
            {"block_bytes": 41 * MIB},
            r"at least 85983232, not 83886080.*block_bytes smaller",
            {"block_bytes": 40 * MIB},
        ),
        (
            {"connections": 4, "block_bytes": MIB, "budget_bytes": MIB},
            r"at least 10485760, not 1048576.*two parts .*\)\.$",
            {"budget_bytes": 10 * MIB},
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(settings, told, works):
    with pytest.raises(ConfigurationError, match=told):
        Transfer(**settings)
    Transfer(**{**settings, **works})


def test_more_connections_than_file_descriptors_are_refused_by_the_process(files):
    many = Transfer(501)
    with pytest.raises(
        ConfigurationError, match=r"connections must be at most 500, not 501.*ulimit"
    ):
        many.check()
    replace(many, connections=500).check()


def test_file_descriptors_that_are_not_limited_limit_nothing(monkeypatch):
    assert _transfer.most_files() in {resource.getrlimit(resource.RLIMIT_NOFILE)[0], None}
    monkeypatch.setattr(
        resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    assert _transfer.most_files() is None
    Transfer(10**6).check()


def test_as_it_is_without_settings(files):
    usual = Transfer()
    usual.check()
    assert (usual.connections, usual.block_bytes, usual.budget_bytes) == (16, 8 * MIB, 80 * MIB)
    assert (usual.gather_budget(), usual.gather_block()) == (24 * MIB, 4 * MIB)
    assert (parts_at_once(usual, usual.budget_bytes), creates_at_once(usual)) == (15, 6)


def test_few_connections_and_little_memory_still_move():
    least = Transfer(1, 2**16, 10 * MIB)
    assert (parts_at_once(least, 10 * MIB), parts_at_once(least, 0, 2), creates_at_once(least)) == (
        1,
        1,
        1,
    )
    assert least.gather_budget() >= least.gather_block()


def test_they_are_obeyed(small_s3, small_s3_drivers):
    store = RemoteStore(
        "s3://bucket/run", small_s3_drivers["obstore"], transfer=Transfer(3, 2**16, 30 * MIB)
    )
    small_s3.objects["run/k"] = bytes(2**18)
    small_s3.log.clear()
    with store.open("k", 2**18) as reader:
        reader.expect(0, 2**18)
        reader.read_into(0, memoryview(bytearray(2**18)))
    assert [method for method, _ in small_s3.log] == ["GET"] * 4
    assert store._transfers._executor._max_workers == 3
    assert (store.budget, block_bytes_of(store)) == (30 * MIB, 2**16)
    store.close()


def test_gather_takes_less_of_them(monkeypatch, small_s3, small_s3_drivers):
    store = RemoteStore(
        "s3://bucket/run", small_s3_drivers["obstore"], transfer=Transfer(4, 2 * MIB, 40 * MIB)
    )
    model, blocks = torch.nn.Linear(2, 2), []
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    begin = Inputs.__init__

    def watched(inputs, *args, **named):
        begin(inputs, *args, **named)
        blocks.append(inputs.block_bytes)

    monkeypatch.setattr(Inputs, "__init__", watched)
    exchange = StoreExchange(store, 0, 1, Elastic(1, topology="gather"))
    with DiLoCo(model, inner, exchange, sync_every=1, save_inner_every=0):
        assert store.budget == 12 * MIB
        model(torch.ones(2)).sum().backward()
        inner.step()
    assert blocks == [MIB]


def test_s3fs_has_as_many_connections(small_s3):
    driver = FsspecDriver("s3://bucket/run", 33)
    assert driver._fs.config_kwargs["max_pool_connections"] == 33


@pytest.mark.parametrize("options", [{}, {"min_replicas": 1}])
def test_connect_hands_them_on(options):
    transfer = Transfer(connections=5)
    exchange = connect("memory://transfer/run", rank=0, world_size=1, transfer=transfer, **options)
    assert exchange.store.transfer == transfer
    exchange.leave()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_folders_have_no_use_for_them(tmp_path, scheme):
    place = {"uri": f"{scheme}{tmp_path}/run", "rank": 0, "world_size": 1}
    with pytest.raises(ConfigurationError, match=r"transfer=Transfer\(connections=5, .* a folder"):
        connect(**place, transfer=Transfer(connections=5))
    assert not (tmp_path / "run").exists()
    exchange = connect(**place, transfer=Transfer())
    assert (
        block_bytes_of(exchange.store) == block_bytes_of(open_store("memory://transfer/near")) == 0
    )
    exchange.leave()
