"""Requests in several parts, and those that fail, at the small S3 with both drivers."""

import gc
import threading
import weakref

import pytest

from diloco_core import CorruptedObjectError, ObjectNotFoundError, StoreUnavailableError
from diloco_core._store._drivers import _remote as _store_remote
from diloco_core._store._transfer import PART_BYTES, Transfer


def test_parts_of_an_upload_are_sent_again(store, small_s3):
    data = bytes(range(256)) * (3 * PART_BYTES // 256) + b"end"
    for what in (500, "drop"):
        small_s3.fail(what, "PUT", times=1, part="partNumber=2")
        small_s3.fail(what, "POST", times=1, part="uploads")
        assert store.put("large", iter([data])) == len(data)
        assert small_s3.objects["run/large"] == data
    assert small_s3.uploads == {}


def test_they_are_counted(store, small_s3):
    small_s3.log.clear()
    store.requests.writes = store.requests.reads = 0
    store.put("small", [b"x"])
    assert store.create("created", [b"x"])
    assert not store.create("created", [b"y"])
    store.once().put("live", [b"x"])
    store.list("")
    assert store.get("small") == b"x"
    store.put("large", iter([bytes(PART_BYTES)] * 3))
    store.put("listed", [bytes(3 * PART_BYTES)])
    with store.open("large") as reader:
        reader.read_into(PART_BYTES, memoryview(bytearray(100)))
    store.delete(["small"])
    paid = [path for method, path in small_s3.log if method in {"GET", "HEAD"}]
    reads = sum("list-type" not in path for path in paid)
    assert store.requests.reads == reads
    writes = sum(
        method in {"PUT", "POST"} and "?delete" not in path for method, path in small_s3.log
    )
    assert abs(store.requests.writes - writes - len(paid) + reads) <= 2, "about, for large ones"


def test_an_upload_that_fails_leaves_nothing(store, small_s3):
    small_s3.fail(400, "PUT", times=99, part="partNumber=3", code="InvalidPart")
    with pytest.raises(StoreUnavailableError, match=r"cannot write object 'large'.*InvalidPart"):
        store.put("large", [bytes(PART_BYTES)] * 3)
    assert list(small_s3.objects) == []
    assert small_s3.uploads == {}


def test_uploads_and_reads_run_several_at_a_time_in_bounded_memory(small_s3, driver, remote):
    made, size = [], 8 * PART_BYTES
    store = remote(driver, transfer=Transfer(budget_bytes=4 * PART_BYTES))

    def parts():
        for _ in range(8):
            uploads = small_s3.uploads.values()
            made.append(sum(len(part) for upload in uploads for part in upload.values()))
            yield bytes(PART_BYTES)

    if driver.name == "obstore":  # the server answers two parts at a time, and never one alone
        small_s3.gate, small_s3.gated = threading.Barrier(2), ("PUT", "partNumber=")
    store.put("large", parts())
    small_s3.gate = None
    assert len(small_s3.objects["run/large"]) == size
    if driver.name == "obstore":
        held = [number * PART_BYTES - there for number, there in enumerate(made)]
        assert max(held) <= 4 * PART_BYTES, "made, but not yet there"
    small_s3.log.clear()
    with store.open("large") as reader:
        reader.expect(100, size)
        buffer = bytearray(PART_BYTES // 2)
        for start in range(100, size - len(buffer), len(buffer)):
            assert reader.transfers.held <= 4 * PART_BYTES
            reader.read_into(start, memoryview(buffer))


@pytest.mark.sampled
@pytest.mark.parametrize("first", [0, 100, 65_536, 200_000])
def test_reading_asks_for_what_was_announced_and_for_nothing_else(store, small_s3, first):
    content = small_s3.objects["run/k"] = bytes(range(256)) * 4096
    with store.open("k") as reader:
        small_s3.log.clear()
        small_s3.served = 0
        reader.expect(first, 900_000)
        buffer = bytearray(1000)
        for start in range(first, 900_000 - 1000, 1000):
            reader.read_into(start, memoryview(buffer))
            assert bytes(buffer) == content[start : start + 1000]
        assert len(small_s3.log) == 1, "256 KiB or more with each request"
        here = 65_536 if store.driver.name == "obstore" else 0  # came when the object was opened
        assert small_s3.served == 900_000 - max(first, here)


def test_what_was_announced_may_be_passed_over(store, small_s3, monkeypatch):
    content = small_s3.objects["run/k"] = bytes(range(256)) * 8192
    monkeypatch.setattr(store.background, "block_bytes", 256 * 2**10)
    with store.open("k") as reader:
        reader.expect(100, 2_000_000)
        buffer = bytearray(1000)
        for start in (500_000, 1_500_000, 100, 1_900_000):
            reader.read_into(start, memoryview(buffer))
            assert bytes(buffer) == content[start : start + 1000]


def test_a_range_that_comes_short_is_damage(store, small_s3):
    small_s3.objects["run/k"] = bytes(500_000)
    with store.open("k") as reader:
        small_s3.objects["run/k"] = bytes(300_000)
        with pytest.raises(CorruptedObjectError, match=r"run/k: .* and the store sent 50000"):
            reader.read_into(250_000, memoryview(bytearray(200_000)))
        del small_s3.objects["run/k"]
        with pytest.raises(ObjectNotFoundError, match="'k'"):
            reader.read_into(100_000, memoryview(bytearray(1000)))


def test_listings_go_over_all_pages(store, small_s3):
    small_s3.page = 3
    for number in range(10):
        store.put(f"many/{number}", [b"x"])
    assert list(store.list("many/")) == [f"many/{number}" for number in range(10)]


@pytest.mark.sampled
@pytest.mark.parametrize("act", ["create", "put"])
def test_what_could_not_be_written_is_let_go_of_at_once(store, small_s3, monkeypatch, act):
    """An error would hold the memory of a whole shard until the next garbage collection."""
    blocks, real = [], _store_remote.blocks_of

    class Block(bytearray):
        """Unlike its parent, weak references to it can be made."""

    def watched(parts, size):
        for block in real(parts, size):
            kept = Block(block)
            blocks.append(weakref.ref(kept))
            yield kept

    monkeypatch.setattr(_store_remote, "blocks_of", watched)
    if act == "create":
        small_s3.objects["run/large"] = b"theirs"
    else:
        small_s3.fail(400, "PUT", times=99, code="InvalidRequest")
        small_s3.fail(400, "POST", times=99, code="InvalidRequest")
    gc.collect()
    gc.disable()
    try:
        if act == "create":
            assert not store.create("large", iter([bytes(2**20)] * 20))
        else:
            with pytest.raises(StoreUnavailableError):
                store.put("large", iter([bytes(2**20)] * 20))
        assert blocks
        assert [block for block in blocks if block() is not None] == []
    finally:
        gc.enable()


@pytest.mark.sampled
@pytest.mark.parametrize("what", [500, 503, 429, "drop", "lose", "cut"])
def test_what_may_pass_is_tried_again(store, small_s3, what):
    store.put("k", [b"value" * 100])
    for act, method in (
        (lambda: store.put("other", [b"other"]), "PUT"),
        (lambda: store.get("k"), "GET"),
        (lambda: store.list(""), "GET"),
        (lambda: store.open("k").close(), "GET"),
        (lambda: store.open("k").close(), "HEAD"),
    ):
        small_s3.fail(what, method, times=2)
        act()
        small_s3.faults.clear()
    assert store.get("k") == b"value" * 100
    assert sorted(store.list("")) == ["k", "other"]


@pytest.mark.parametrize(
    ("jitter", "first"),
    [(1.0, [0.2, 0.4, 0.8, 1.6, 3.2, 5.0]), (0.0, [0.1, 0.2, 0.4, 0.8, 1.6, 2.5])],
)
def test_pauses_grow_have_jitter_and_end(
    small_s3, small_s3_drivers, remote, clock, monkeypatch, jitter, first
):
    pauses, sleep = [], clock.sleep
    monkeypatch.setattr(clock, "sleep", lambda seconds: (pauses.append(seconds), sleep(seconds)))
    store = remote(small_s3_drivers["obstore"], jitter=jitter)
    small_s3.fail(503, "PUT", times=1000)
    with pytest.raises(StoreUnavailableError, match=r"tried again for up to 60 s"):
        store.put("k", [b"x"])
    assert pauses[:6] == pytest.approx(first)
    assert sum(pauses) <= 60 < sum(pauses) + first[-1]
