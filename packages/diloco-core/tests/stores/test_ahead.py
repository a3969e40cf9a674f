"""Opening many objects: several requests at once, in order, and nothing stays open."""

import threading

import pytest

from diloco_core import ObjectNotFoundError
from diloco_core._store import open_store
from diloco_core._store_ahead import open_ahead
from diloco_core._store_remote import RemoteStore


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


def test_several_are_opened_at_once_and_come_in_order(store, small_s3):
    small_s3.gate = threading.Barrier(8)  # one after another, nothing would ever be answered
    with open_ahead(store, map(str, range(16))) as readers:
        first = [next(readers) for _ in range(16)]
        small_s3.gate = None
        assert next(readers, "the end") == "the end"
    assert [read(reader) for reader in first] == [bytes([number]) * 1000 for number in range(16)]


def test_what_is_announced_is_there_when_it_is_read(store, small_s3):
    keys = [str(number) for number in range(4)]
    with open_ahead(store, keys, lambda _, reader: reader.expect(100_000, 300_000)) as readers:
        opened = list(readers)
    for reader in opened:
        reader.expect(100_000, 300_000)  # again, as whoever reads does
    assert [read(reader) for reader in opened] == [bytes([number]) * 1000 for number in range(4)]
    asked = [
        path for method, path in small_s3.log if method == "GET" and "probes" not in path and "list-type" not in path
    ]
    each = 2 if store.driver.name == "obstore" else 1  # which gets the beginning with the size
    assert len(asked) == 4 * each


def test_what_cannot_be_opened_is_left_to_the_caller(store, small_s3):
    del small_s3.objects["run/1"]
    with open_ahead(store, ["0", "1", "2"]) as readers:
        first, second, third = readers
    assert second is None
    with pytest.raises(ObjectNotFoundError, match="'1'"):
        store.open("1")
    assert (read(first), read(third)) == (b"\0" * 1000, b"\2" * 1000)


def test_what_was_not_taken_is_closed(store):
    with open_ahead(store, map(str, range(32))) as readers:
        next(readers).close()
    executor = store._transfers._executor
    store.close()
    executor.shutdown(wait=True)
    assert store._transfers._readers == 0


def test_where_requests_cost_nothing_everything_is_left_to_the_caller(tmp_path):
    for store in (open_store(str(tmp_path)), open_store("memory://ahead/run")):
        with open_ahead(store, ["a", "b"]) as readers:
            assert list(readers) == [None, None]


def test_an_object_whose_size_is_known_needs_no_request_to_be_opened(store, small_s3):
    small_s3.log.clear()
    with store.open("3", 300_000) as reader:
        assert small_s3.log == []
        buffer = bytearray(1000)
        reader.read_into(299_000, memoryview(buffer))
    assert bytes(buffer) == b"\3" * 1000
    with store.open("absent", 300_000) as reader, pytest.raises(ObjectNotFoundError, match="'absent'"):
        reader.read_into(0, memoryview(buffer))
