"""Large uploads: as many parts at once as fit into memory, and no copies without need."""

import errno
import os
import threading
import time
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from diloco_core import DiLoCo, Elastic, StoreExchange, StoreUnavailableError
from diloco_core._store._drivers._fsspec import FsspecDriver
from diloco_core._store._transfer import (
    BUDGET_BYTES,
    CONNECTIONS,
    PART_BYTES,
    Transfer,
    parts_at_once,
)

_numbers = count()


class RecordingDriver(FsspecDriver):
    """Objects in memory; remembers how every upload went."""

    def __init__(self, copies):
        super().__init__(f"memory://uploads/{next(_numbers)}")
        self.near, self.copies = False, copies
        self.seen = []

    def upload(self, key, blocks, sending):
        blocks, held = list(blocks), self.store.background.held
        self.seen.append(SimpleNamespace(blocks=blocks, at_once=sending.at_once, held=held))
        self.during()
        self._pipe(key, b"".join(blocks), sending.exclusive)

    def during(self):
        """Do something else while an upload goes on."""


@pytest.fixture(params=[0, 2], ids=["sends what it was given", "copies twice"])
def store(request, remote):
    driver = RecordingDriver(request.param)
    driver.store = remote(driver)
    return driver.store


def parts(number=2):
    for _ in range(number):
        yield bytes(PART_BYTES)


@pytest.mark.parametrize(
    ("free", "copies", "at_once"),
    [
        (BUDGET_BYTES, 1, 15),
        (BUDGET_BYTES, 2, 7),
        (BUDGET_BYTES // 2, 1, 7),
        (0, 1, 7),
        (-BUDGET_BYTES, 2, 3),
        (10 * BUDGET_BYTES, 1, CONNECTIONS),
        (0, 1000, 1),
    ],
)
def test_how_many_parts_are_under_way(free, copies, at_once):
    assert parts_at_once(Transfer(), free, copies) == at_once


def test_an_upload_takes_what_nobody_uses_and_gives_it_back(store):
    copies = store.driver.copies or 1
    store.put("alone", parts())
    store.background.hold(BUDGET_BYTES // 4)
    store.put("beside reads", parts())
    store.background.hold(-BUDGET_BYTES // 4)
    alone, beside = store.driver.seen
    assert alone.at_once == parts_at_once(Transfer(), BUDGET_BYTES, copies)
    assert alone.held == copies * PART_BYTES * (alone.at_once + 1)
    left = parts_at_once(Transfer(), 3 * BUDGET_BYTES // 4, copies)
    assert beside.at_once == left < alone.at_once
    assert store.background.held == 0


def test_two_uploads_at_once_share(store):
    store.driver.during = lambda: len(store.driver.seen) > 1 or store.put("second", parts())
    store.put("first", parts())
    copies = store.driver.copies or 1
    most = parts_at_once(Transfer(), BUDGET_BYTES, copies)
    # One upload alone may go beyond the budget.
    assert [seen.at_once for seen in store.driver.seen] == [most, 1]
    assert store.background.held == 0
    store.background.hold(BUDGET_BYTES)
    store.put("third", parts())
    assert store.driver.seen[-1].at_once == parts_at_once(Transfer(), 0, copies) > 1


@pytest.mark.parametrize("write", ["put", "create"])
def test_an_upload_that_fails_gives_its_memory_back(store, write):
    store.driver.during = lambda: 1 / 0
    with pytest.raises(Exception, match="division"):
        getattr(store, write)("k", parts())
    with pytest.raises(Exception, match="division"):
        getattr(store, write)("k", list(parts()))
    assert store.background.held == 0


@pytest.mark.parametrize("write", ["put", "create"])
def test_what_stays_as_it_is_goes_up_without_a_copy(store, write):
    data = bytearray(2 * PART_BYTES)
    view = memoryview(data)
    views = [view[:PART_BYTES], view[:0], view.cast("f")[PART_BYTES // 4 :]]
    getattr(store, write)("k", views)
    (seen,) = store.driver.seen
    assert [len(block) for block in seen.blocks] == [PART_BYTES, PART_BYTES]
    assert seen.held == store.driver.copies * PART_BYTES * (seen.at_once + 1)
    data[0] = 1
    assert seen.blocks[0][0] == 1
    del seen, views
    store.driver.seen.clear()
    getattr(store, write)("another", (memoryview(data)[:PART_BYTES] for _ in range(2)))
    data[0] = 2
    assert store.driver.seen[0].blocks[0][0] == 1, "a part that may be used again is copied"


def test_small_ones_are_one_request(store):
    assert store.put("k", [b"a", b"", memoryview(b"bc")]) == 3
    assert store.create("another", [b"a" * 100, b"b" * 100])
    assert not store.create("another", [b"c"])
    assert store.create("another", [b"a" * 100, b"b" * 100]), "the same bytes count as one's own"
    assert (store.get("k"), store.get("another")) == (b"abc", b"a" * 100 + b"b" * 100)
    assert store.driver.seen == []


def gather(store):
    """Train with one replica that publishes four shards after each of its syncs."""
    model = torch.nn.Linear(32, 8, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = StoreExchange(store, 0, 1, Elastic(1, topology="gather", publish_every=1))
    with DiLoCo(model, inner, exchange, sync_every=1, save_inner_every=0):
        yield
        for _ in range(2):
            model(torch.ones(32)).sum().backward()
            inner.step()


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr("diloco_core._arithmetic._layout.SHARD_BYTES", 256)


def test_gather_publishes_several_shards_at_the_same_time(s3, small_s3, small_shards, monkeypatch):
    create, lists = s3.create, []

    def noted(key, data):
        lists.extend([isinstance(data, list)] * key.endswith(".safetensors"))
        return create(key, data)

    monkeypatch.setattr(s3, "create", noted)
    running = gather(s3)
    next(running)
    # Of one shard after another, none would end.
    small_s3.gate, small_s3.gated = threading.Barrier(4), ("PUT", "/000.0")
    assert list(running) == []
    small_s3.gate = None
    keys = [key for key in small_s3.objects if key.startswith("run/state/00000001/")]
    assert sum(key.endswith(".safetensors") for key in keys) == 4
    assert all(lists), "what stays as it is goes over a network without a copy"


def test_where_one_fails_the_others_are_waited_for(s3, small_shards, monkeypatch):
    """Otherwise they would read memory that training writes to again."""
    create, both, ended = s3.create, threading.Barrier(2), []

    def fails(key, data):
        if not key.startswith("state/00000001") or not key.endswith(".safetensors"):
            return create(key, data)
        number = both.wait()
        if ".00000." in key:
            raise StoreUnavailableError("no", lasting=True)
        time.sleep(0.3)  # for one who does not wait to be seen
        ended.append(number)
        return create(key, data)

    running = gather(s3)
    next(running)
    monkeypatch.setattr(s3, "create", fails)
    with pytest.raises(StoreUnavailableError, match="no"):
        next(running)
    assert ended


@pytest.fixture
def s3fs(small_s3, small_s3_drivers, remote, tmp_path, monkeypatch):
    """A store that keeps parts of uploads in a temporary folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return remote(small_s3_drivers["fsspec"])


def test_a_temporary_folder_that_is_full_leaves_nothing(s3fs, small_s3, tmp_path, full_disk):
    with pytest.raises(StoreUnavailableError, match=r"temporary files.*File too large.*TMPDIR"):
        s3fs.put("large", [bytes(PART_BYTES)] * 2)
    assert small_s3.objects == {}
    assert list(tmp_path.iterdir()) == []


def test_room_in_the_temporary_folder_is_waited_for(s3fs, small_s3, tmp_path, monkeypatch):
    real, tries = os.write, []

    def full(descriptor, data):
        tries.append(len(data))
        if len(tries) in {2, 4}:
            return real(descriptor, data[:1000])
        if len(tries) < 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    s3fs.put("large", [b"a" * PART_BYTES, b"b" * PART_BYTES])
    assert len(tries) == 7
    assert small_s3.objects["run/large"] == b"a" * PART_BYTES + b"b" * PART_BYTES
    monkeypatch.setattr(os, "write", lambda *_: full(tries.clear(), b""))
    s3fs.patience = 0.0
    text = r"folder for temporary files.*No space left.*TMPDIR"
    with pytest.raises(StoreUnavailableError, match=text) as caught:
        s3fs.put("large", [bytes(PART_BYTES)])
    assert not caught.value.lasting
    assert list(tmp_path.iterdir()) == []
