"""Test what every store promises, on every driver: one set of laws."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco_core import CorruptedObjectError, ObjectNotFoundError
from diloco_core._store._api import creates_once
from diloco_core._store._transfer import PART_BYTES

laws = settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
# Not from_regex, which looks at all characters of Unicode first.
FIRST = "abcdefghijklmnopqrstuvwxyz0123456789"
names = st.builds(str.__add__, st.sampled_from(FIRST), st.text(FIRST + "._-", max_size=11))
keys = st.lists(names, min_size=1, max_size=3).map("/".join)


def together(count, act):
    """``act(number)`` in that many threads that start at once; what they returned."""
    start = threading.Barrier(count)

    def one(number):
        start.wait()
        return act(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def pattern(size):
    """Bytes that are different everywhere nearby."""
    numbers = b"".join(number.to_bytes(4, "big") for number in range(65536))
    return (numbers * (size // len(numbers) + 1))[:size]


@pytest.mark.sampled
@laws
@given(
    parts=st.lists(st.binary(max_size=100), max_size=5), replaced=st.none() | st.binary(max_size=50)
)
def test_what_was_put_comes_back(any_store, parts, replaced):
    if replaced is not None:
        any_store.put("k", [replaced])
    assert any_store.put("k", parts) == sum(map(len, parts))
    assert any_store.get("k") == b"".join(parts)


@pytest.mark.sampled
def test_a_part_may_be_reused_as_soon_as_the_next_is_asked_for(any_store):
    def parts(size):
        buffer = bytearray(size)
        for number in range(5):
            buffer[:] = bytes([number]) * size
            yield memoryview(buffer)

    for size in (3, PART_BYTES // 3):
        assert any_store.put("k", parts(size)) == 5 * size
        assert any_store.get("k") == b"".join(bytes([number]) * size for number in range(5))


@pytest.mark.sampled
@pytest.mark.parametrize("size", [0, 10, PART_BYTES + 1])
def test_nothing_is_visible_when_the_parts_fail(any_store, size):
    def parts():
        yield bytes(size)
        raise OSError(5, "the disk of the sender")

    for write in (any_store.put, any_store.create):
        with pytest.raises(OSError, match="the disk of the sender"):
            write("torn/k", parts())
        assert any_store.list("torn/") == {}
        with pytest.raises(ObjectNotFoundError):
            any_store.get("torn/k")
    assert any_store.create("torn/k", b"the key is free")


@pytest.mark.sampled
def test_a_reader_never_sees_a_part_of_an_object(any_store):
    any_store.put("k", [bytes(200_000)])
    writing = threading.Event()
    writing.set()

    def write(number):
        for value in range(1, 30):
            any_store.put("k", [bytes([value]) * 100_000, bytes([value]) * 100_000])
        writing.clear()

    def read(number):
        seen = set()
        while writing.is_set():
            data = any_store.get("k")
            seen.add((len(data), len(set(data))))
        return seen

    assert together(2, lambda number: [write, read][number](number))[1] <= {(200_000, 1)}


@pytest.mark.sampled
def test_one_of_many_racing_creates_wins(any_store):
    for number in range(6):
        key, size = f"race/{number}", 70_000 if number % 2 else 1
        create = partial(any_store.create, key)
        won = together(6, lambda who, create=create, size=size: create(bytes([who]) * size))
        assert won.count(True) == 1
        assert any_store.get(key) == bytes([won.index(True)]) * size


@pytest.mark.sampled
def test_a_large_object_is_created_once(any_store):
    data = pattern(2 * PART_BYTES + 5)
    parts = (data[start : start + 10**6] for start in range(0, len(data), 10**6))
    assert any_store.create("large", parts)
    assert not any_store.create("large", [bytes(PART_BYTES), bytes(PART_BYTES)])
    with any_store.open("large") as reader:
        assert reader.size == len(data)
    assert any_store.get("large") == data


def test_the_probe_finds_that_creates_are_exclusive(any_store):
    assert creates_once(any_store)
    assert any_store.list("probes/") == {}


@pytest.mark.sampled
@laws
@given(size=st.integers(1, 300_000), data=st.data())
def test_ranged_reads(any_store, size, data):
    content = pattern(size)
    any_store.put("k", [content])
    with any_store.open("k") as reader:
        assert reader.size == size
        for _ in range(4):
            start = data.draw(st.integers(0, size - 1))
            stop = data.draw(st.integers(start, size))
            if data.draw(st.booleans()):
                reader.expect(start, data.draw(st.integers(start, size)))
            buffer = bytearray(stop - start)
            reader.read_into(start, memoryview(buffer))
            assert bytes(buffer) == content[start:stop]
        with pytest.raises(CorruptedObjectError, match="truncated"):
            reader.read_into(size, memoryview(bytearray(1)))


def test_an_empty_object_can_be_opened(any_store):
    any_store.put("k", [])
    with any_store.open("k") as reader:
        assert reader.size == 0
        reader.read_into(0, memoryview(bytearray()))


@pytest.mark.sampled
@laws
@given(wanted=st.sets(keys, max_size=8), data=st.data())
def test_listings_are_complete_sorted_and_fresh(any_store, wanted, data):
    any_store.delete(any_store.list(""))
    assert any_store.list("") == {}
    # No key is another's folder: on a file system a name is either a file or a folder.
    wanted = sorted(
        key for key in wanted if not any(other.startswith(f"{key}/") for other in wanted)
    )
    for size, key in enumerate(wanted):
        any_store.put(key, [bytes(size)])
    sizes = {key: size for size, key in enumerate(wanted)}
    assert list(any_store.list("").items()) == sorted(sizes.items())
    gone = data.draw(st.sets(st.sampled_from(wanted))) if wanted else set()
    any_store.delete(gone)
    left = {key: size for key, size in sizes.items() if key not in gone}
    assert list(any_store.list("").items()) == sorted(left.items())
    for key in wanted:
        folder = key.rpartition("/")[0] + "/"
        if folder != "/":
            assert any_store.list(folder) == {
                k: size for k, size in left.items() if k.startswith(folder)
            }


def test_a_folder_is_not_its_longer_namesake(any_store):
    for key in ("a/1", "ab/2", "a.b/3"):
        any_store.put(key, [b"x"])
    assert list(any_store.list("a/")) == ["a/1"]


@pytest.mark.sampled
@laws
@given(there=st.sets(names, max_size=4), asked=st.lists(names, max_size=6))
def test_delete_is_idempotent(any_store, there, asked):
    any_store.delete(any_store.list("d/"))
    for name in there:
        any_store.put(f"d/{name}", [b"x"])
    for _ in range(2):
        any_store.delete([f"d/{name}" for name in asked])
        assert set(any_store.list("d/")) == {f"d/{name}" for name in there - set(asked)}


def test_what_is_absent_is_named(any_store):
    for look in (any_store.get, any_store.open):
        with pytest.raises(ObjectNotFoundError, match=r"'no/such'"):
            look("no/such")


def test_a_closed_store_may_still_be_used(any_store):
    any_store.put("k", [pattern(300_000)])
    for _ in range(2):
        any_store.close()
        with any_store.open("k") as reader:
            reader.expect(70_000, 300_000)
            buffer = bytearray(1)
            reader.read_into(299_999, memoryview(buffer))
            assert bytes(buffer) == pattern(300_000)[-1:]


@pytest.mark.sampled
def test_what_is_larger_than_a_record_is_refused_by_its_size(any_store):
    any_store.put("k", [bytes(PART_BYTES)] * 2)
    assert len(any_store.get("k")) == 2 * PART_BYTES
    assert len(any_store.get("k", 2 * PART_BYTES)) == 2 * PART_BYTES
    text = rf"/k has {2 * PART_BYTES} bytes, and at most 1000 bytes are read"
    with pytest.raises(CorruptedObjectError, match=text):
        any_store.get("k", 1000)
    any_store.put("empty", [])
    assert any_store.get("empty", 0) == b""
    assert any_store.get("empty") == b""
