"""Reading many objects: several requests at once, in the order of use, in bounded memory."""

import threading
import weakref
from contextlib import ExitStack

import pytest
import torch

from diloco_core import DiLoCo, Elastic, ObjectNotFoundError, StoreExchange
from diloco_core._store._drivers._blocks import BlockReader
from diloco_core._store._drivers._remote import RemoteStore
from diloco_core._store._open import open_store
from diloco_core._store._reread import open_ahead
from diloco_core._store._transfer import PART_BYTES


@pytest.fixture(params=["obstore", "fsspec"])
def store(request, small_s3, small_s3_drivers):
    opened = RemoteStore("s3://bucket/run", small_s3_drivers[request.param])
    small_s3.objects.update({f"run/{number}": bytes([number]) * 300_000 for number in range(32)})
    yield opened
    executor = opened._transfers._executor
    opened.close()
    if executor is not None:
        executor.shutdown(wait=True)  # what is under way would be in the next test's log


def read(reader):
    buffer = bytearray(1000)
    with reader:
        reader.read_into(150_000, memoryview(buffer))
    return bytes(buffer)


def gets(small_s3):
    """Paths of the objects that were asked for."""
    return [
        path
        for method, path in small_s3.log
        if method == "GET" and "probes" not in path and "list-type" not in path
    ]


def test_what_is_announced_is_fetched_several_at_a_time_and_once(store, small_s3):
    small_s3.log.clear()
    small_s3.gate = threading.Barrier(8)  # one after another, nothing would ever be answered
    sizes = {str(number): 300_000 for number in range(16)}
    with open_ahead(store, sizes, lambda _, reader: reader.expect(100_000, 300_000)) as readers:
        opened = list(readers)
        for reader in opened:
            reader.expect(100_000, 300_000)  # again, as whoever reads does
        assert [read(reader) for reader in opened] == [
            bytes([number]) * 1000 for number in range(16)
        ]
    small_s3.gate = None
    assert len(gets(small_s3)) == 16


def test_in_the_order_of_use_whatever_is_read_next(store, small_s3, monkeypatch):
    """Less memory than is announced: what is used next is there, and nothing waits for ever."""
    store.budget = 400_000
    small_s3.log.clear()
    with ExitStack() as stack:
        readers = [stack.enter_context(store.open(str(number), 300_000)) for number in range(8)]
        for start in (0, 150_000):
            for reader in readers:
                reader.expect(start, start + 150_000)
        for start in (0, 150_000):
            for number, reader in enumerate(readers):
                assert store._transfers.held <= 400_000
                buffer = bytearray(150_000)
                reader.read_into(start, memoryview(buffer))
                assert bytes(buffer) == bytes([number]) * 150_000
        assert store._transfers.held == 0
        assert len(gets(small_s3)) == 16
        for start in (0, 150_000):
            for reader in readers:
                reader.expect(start, start + 150_000)
        for start in (150_000, 0):  # in another order than was said
            for number, reader in reversed(list(enumerate(readers))):
                buffer = bytearray(150_000)
                reader.read_into(start, memoryview(buffer))
                assert bytes(buffer) == bytes([number]) * 150_000
    assert store._transfers.held == 0


def test_what_was_not_read_gives_its_memory_back(store, small_s3):
    with open_ahead(
        store,
        {str(number): 300_000 for number in range(32)},
        lambda _, reader: reader.expect(0, 300_000),
    ) as readers:
        read(next(readers))
    executor = store._transfers._executor
    store.close()
    executor.shutdown(wait=True)
    assert store._transfers.held == 0


def test_what_cannot_be_read_is_left_to_who_reads(store, small_s3):
    del small_s3.objects["run/1"]
    with open_ahead(
        store, {"0": 300_000, "1": 300_000, "2": None}, lambda _, reader: reader.expect(0, 300_000)
    ) as readers:
        first, second, third = readers
        assert third is None
        with pytest.raises(ObjectNotFoundError, match="'1'"):
            read(second)
        assert read(first) == b"\0" * 1000


def test_where_requests_cost_nothing_everything_is_left_to_the_caller(tmp_path):
    for store in (open_store(str(tmp_path)), open_store("memory://ahead/run")):
        with open_ahead(store, {"a": 1, "b": 1}, lambda *_: None) as readers:
            assert list(readers) == [None, None]


def test_an_object_whose_size_is_known_needs_no_request_to_be_opened(store, small_s3):
    small_s3.log.clear()
    with store.open("3", 300_000) as reader:
        assert small_s3.log == []
        buffer = bytearray(1000)
        reader.read_into(299_000, memoryview(buffer))
    assert bytes(buffer) == b"\3" * 1000
    with (
        store.open("absent", 300_000) as reader,
        pytest.raises(ObjectNotFoundError, match="'absent'"),
    ):
        reader.read_into(0, memoryview(buffer))


def test_what_is_created_in_one_request_takes_its_memory_from_the_budget(store):
    held = []

    def parts():
        for _ in range(3):
            yield bytes(PART_BYTES)
            held.append(store._transfers.held)

    assert store.create("large", parts())
    assert held[-1] >= 2 * PART_BYTES
    assert store._transfers.held == 0
    with pytest.raises(ZeroDivisionError):
        store.create("another", (bytes(PART_BYTES // (2 - number)) for number in range(3)))
    assert store._transfers.held == 0


def test_where_every_object_is_a_request_of_its_own_deletions_go_at_the_same_time(store, small_s3):
    if not store.driver.deletes_many:
        small_s3.gate = threading.Barrier(8)  # one after another, none would ever be answered
    store.delete(map(str, range(16)))
    small_s3.gate = None
    assert sorted(small_s3.objects) == sorted(f"run/{number}" for number in range(16, 32))


@pytest.mark.parametrize(("topology", "budget"), [("gather", 24 * 2**20), ("sharded", 80 * 2**20)])
def test_gather_reads_ahead_in_less_memory(store, topology, budget):
    model = torch.nn.Linear(2, 2)
    exchange = StoreExchange(store, 0, 1, Elastic(1, topology=topology))
    with DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange, sync_every=1):
        assert store.budget == budget


def test_a_block_is_let_go_before_the_next_one_is_waited_for():
    """Also in one reading that spans both: otherwise two are held where the budget counts one."""

    class Block(bytearray):
        """Unlike its parent, weak references to it can be made."""

    fetched = []

    def fetch(start, stop):
        assert all(block() is None for block in fetched)
        block = Block(range(start, stop))
        fetched.append(weakref.ref(block))
        return block

    class Waits:
        """Fetches a range no sooner than it is waited for."""

        block_bytes = 10

        def announce(self, wanted):
            pass

        def take(self, wanted):
            return wanted.fetch(wanted.start, wanted.stop)

        def drop(self, ranges):
            pass

    reader = BlockReader(fetch, 30, b"", "k", Waits())
    reader.expect(0, 30)
    buffer = bytearray(25)
    reader.read_into(0, memoryview(buffer)[:5])
    reader.read_into(5, memoryview(buffer)[5:])
    assert bytes(buffer) == bytes(range(25))
    assert len(fetched) == 3
