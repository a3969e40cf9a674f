"""Large uploads: as many parts at once as fit into memory, and no copies of what stays as it is."""

import threading
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from diloco_core import DiLoCo, Elastic, StoreExchange
from diloco_core._arithmetic import _shard_sizes
from diloco_core._retry import Retries
from diloco_core._run._incarnation._incarnation import Incarnation
from diloco_core._run._incarnation._memory import Traffic
from diloco_core._store._drivers._fsspec import FsspecDriver
from diloco_core._store._drivers._remote import RemoteStore
from diloco_core._store._drivers._uploads import parts_at_once
from diloco_core._store._transfer import BUDGET_BYTES, CONNECTIONS, PART_BYTES, Transfer

_numbers = count()


class RecordingDriver(FsspecDriver):
    """Objects in memory; remembers how every upload went."""

    def __init__(self, copies):
        super().__init__(f"memory://uploads/{next(_numbers)}")
        self.near, self.copies = False, copies
        self.seen = []

    def upload(self, key, blocks, sending):
        blocks = list(blocks)
        self.seen.append(
            SimpleNamespace(
                key=key, blocks=blocks, at_once=sending.at_once, held=self.store._transfers.held
            )
        )
        self.during()
        self._pipe(key, b"".join(blocks), sending.exclusive)

    def during(self):
        """What else happens while something goes up."""


@pytest.fixture(params=[0, 2], ids=["sends what it was given", "copies twice"])
def store(request):
    driver, now = RecordingDriver(request.param), [0.0]
    retries = Retries(clock=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    driver.store = RemoteStore("s3://bucket/run", driver, retries)
    yield driver.store
    driver.store.close()


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
    store._transfers.hold(BUDGET_BYTES // 4)
    store.put("beside reads", parts())
    store._transfers.hold(-BUDGET_BYTES // 4)
    alone, beside = store.driver.seen
    assert alone.at_once == parts_at_once(Transfer(), BUDGET_BYTES, copies)
    assert alone.held == copies * PART_BYTES * (alone.at_once + 1)
    assert (
        beside.at_once == parts_at_once(Transfer(), 3 * BUDGET_BYTES // 4, copies) < alone.at_once
    )
    assert store._transfers.held == 0


def test_two_uploads_at_once_share(store):
    store.driver.during = lambda: len(store.driver.seen) > 1 or store.put("second", parts())
    store.put("first", parts())
    copies = store.driver.copies or 1
    assert [seen.at_once for seen in store.driver.seen] == [
        parts_at_once(Transfer(), BUDGET_BYTES, copies),
        1,
    ], "whatever is left of the budget, one upload alone may go beyond it"
    assert store._transfers.held == 0
    store._transfers.hold(BUDGET_BYTES)
    store.put("third", parts())
    assert store.driver.seen[-1].at_once == parts_at_once(Transfer(), 0, copies) > 1, (
        "it is the only one again"
    )


@pytest.mark.parametrize("write", ["put", "create"])
def test_an_upload_that_fails_gives_its_memory_back(store, write):
    store.driver.during = lambda: 1 / 0
    with pytest.raises(Exception, match="division"):
        getattr(store, write)("k", parts())
    with pytest.raises(Exception, match="division"):
        getattr(store, write)("k", list(parts()))
    assert store._transfers.held == 0


@pytest.mark.parametrize("write", ["put", "create"])
def test_what_stays_as_it_is_goes_up_without_a_copy(store, write):
    data = bytearray(2 * PART_BYTES)
    views = [
        memoryview(data)[:PART_BYTES],
        memoryview(data)[:0],
        memoryview(data).cast("f")[PART_BYTES // 4 :],
    ]
    getattr(store, write)("k", views)
    (seen,) = store.driver.seen
    assert [len(block) for block in seen.blocks] == [PART_BYTES, PART_BYTES]
    assert seen.held == (
        0 if not store.driver.copies else store.driver.copies * PART_BYTES * (seen.at_once + 1)
    )
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
    assert store.create("another", [b"a" * 100, b"b" * 100]), (
        "the very same bytes count as one's own"
    )
    assert (store.get("k"), store.get("another")) == (b"abc", b"a" * 100 + b"b" * 100)
    assert store.driver.seen == []


def test_how_many_objects_are_created_at_once(store):
    assert store.creates_at_once == (2 if store.driver.copies else 6)
    store.budget = BUDGET_BYTES // 4
    assert store.creates_at_once == (1 if store.driver.copies else 6), (
        "but for those that take memory"
    )


@pytest.mark.parametrize("near", [True, False])
def test_what_is_published_is_not_copied_over_a_network(near):
    given = []

    def create(key, make):
        given.append(make())
        return sum(map(len, given[0])) == 3

    incarnation = SimpleNamespace(
        store=SimpleNamespace(near=near, create=create),
        traffic=Traffic(sent=4),
    )
    assert Incarnation.create(incarnation, "k", lambda: iter([b"ab", b"c"]))
    assert incarnation.traffic.sent == 7
    assert isinstance(given[0], list) is not near


def test_gather_publishes_several_shards_at_the_same_time(small_s3, small_s3_drivers, monkeypatch):
    monkeypatch.setattr(_shard_sizes, "SHARD_BYTES", 256)
    store = RemoteStore("s3://bucket/run", small_s3_drivers["obstore"])
    model = torch.nn.Linear(32, 8, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = StoreExchange(store, 0, 1, Elastic(1, topology="gather", publish_every=1))
    with DiLoCo(model, inner, exchange, sync_every=1, save_inner_every=0):
        small_s3.gate, small_s3.gated = (
            threading.Barrier(4),
            ("PUT", "/state/"),
        )  # of one shard after another, none ends
        for _ in range(2):
            model(torch.ones(32)).sum().backward()
            inner.step()
        small_s3.gate = None
    assert (
        sum(
            key.startswith("run/state/00000001/") and key.endswith(".safetensors")
            for key in small_s3.objects
        )
        == 4
    )
