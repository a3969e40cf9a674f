"""Many requests at once: in order, in bounded memory, and no further ones after an error."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest
from training_lab import PATIENCE

from diloco_core import ObjectNotFoundError
from diloco_core._store._drivers._blocks import BlockReader
from diloco_core._store._open import open_store
from diloco_core._store._reread import in_parallel, open_ahead


@pytest.fixture
def store(small_s3, store):
    small_s3.objects.update({f"run/{number}": bytes([number]) * 300_000 for number in range(32)})
    return store


def read(reader):
    buffer = bytearray(1000)
    with reader:
        reader.read_into(150_000, memoryview(buffer))
    return bytes(buffer)


def gets(small_s3):
    """Return how often objects were asked for."""
    return [method for method, _ in small_s3.log].count("GET")


def test_several_are_fetched_at_a_time_and_each_once(store, small_s3):
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
    assert gets(small_s3) == 16


def test_less_memory_than_is_announced_is_enough(store, small_s3):
    """The part that is used next is read in time, in whatever order, and nothing hangs."""
    store.background.budget = 400_000
    small_s3.log.clear()
    with ExitStack() as stack:
        readers = [stack.enter_context(store.open(str(number), 300_000)) for number in range(8)]
        said = [(start, number) for start in (0, 150_000) for number in range(8)]
        for order in (said, said[::-1]):
            for start, number in said:
                readers[number].expect(start, start + 150_000)
            for start, number in order:
                assert store.background.held <= 400_000 or order is not said
                buffer = bytearray(150_000)
                readers[number].read_into(start, memoryview(buffer))
                assert bytes(buffer) == bytes([number]) * 150_000
            if order is said:
                assert store.background.held == 0
                assert gets(small_s3) == 16
    assert store.background.held == 0


def test_what_was_not_read_gives_memory_back(store, small_s3):
    sizes = {str(number): 300_000 for number in range(32)}
    with open_ahead(store, sizes, lambda _, reader: reader.expect(0, 300_000)) as readers:
        read(next(readers))
    executor = store.background._executor
    store.close()
    executor.shutdown(wait=True)
    assert store.background.held == 0


def test_what_is_absent_is_told_to_who_reads(store, small_s3):
    del small_s3.objects["run/1"]
    sizes = {"0": 300_000, "1": 300_000, "2": None}
    with open_ahead(store, sizes, lambda _, reader: reader.expect(0, 300_000)) as readers:
        first, second, third = readers
        assert third is None
        with pytest.raises(ObjectNotFoundError, match="'1'"):
            read(second)
        assert read(first) == b"\0" * 1000


def test_near_stores_leave_it_to_the_caller(tmp_path):
    for store in (open_store(str(tmp_path)), open_store("memory://ahead/run")):
        with open_ahead(store, {"a": 1, "b": 1}, lambda *_: None) as readers:
            assert list(readers) == [None, None]
        assert set(in_parallel(store, [threading.get_ident] * 3, 16)) == {threading.get_ident()}


def test_a_known_size_saves_a_request(store, small_s3):
    small_s3.log.clear()
    with store.open("3", 300_000) as reader:
        assert small_s3.log == []
        buffer = bytearray(1000)
        reader.read_into(299_000, memoryview(buffer))
    assert bytes(buffer) == b"\3" * 1000
    absent = store.open("absent", 300_000)
    with absent, pytest.raises(ObjectNotFoundError, match="'absent'"):
        absent.read_into(0, memoryview(buffer))


def test_single_deletions_go_at_the_same_time(store, small_s3):
    if not store.driver.deletes_many:
        small_s3.gate = threading.Barrier(8)  # one after another, none would ever be answered
    store.delete(map(str, range(16)))
    small_s3.gate = None
    assert sorted(small_s3.objects) == sorted(f"run/{number}" for number in range(16, 32))


def test_a_block_is_let_go_before_the_next_is_waited_for():
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


@pytest.fixture
def threaded(monkeypatch):
    """A store with threads; nothing but those is used."""
    with ThreadPoolExecutor(16) as pool:
        made = open_store("memory://parallel/run")
        made.near = False
        monkeypatch.setattr(made.background, "submit", pool.submit)
        yield made


@pytest.mark.processes
def test_results_come_in_order_and_several_are_under_way(threaded):
    together = threading.Barrier(4)  # one after another, nobody would get past it

    def act(number):
        together.wait(PATIENCE)
        return number

    acts = [partial(act, number) for number in range(12)]
    assert list(in_parallel(threaded, acts, 4)) == list(range(12))


def test_not_more_than_was_said(threaded):
    lock, under_way, most = threading.Lock(), 0, 0

    def act():
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        with lock:
            under_way -= 1

    assert len(list(in_parallel(threaded, [act] * 50, 3))) == 50
    assert most <= 3


def test_after_an_error_no_further_one_is_begun(threaded):
    begun = []

    def act(number):
        begun.append(number)
        if number == 1:
            raise ValueError(number)

    with pytest.raises(ValueError, match="1"):
        list(in_parallel(threaded, (partial(act, number) for number in range(100)), 2))
    assert max(begun) <= 3


def test_the_next_one_is_made_while_the_others_are_under_way(threaded):
    """An upload goes on while the next shard is computed."""
    made_last, ended = threading.Event(), []

    def make():
        for number in range(2):
            yield partial(act, number)
        made_last.set()

    def act(number):
        assert made_last.wait(PATIENCE)
        ended.append(number)

    assert list(in_parallel(threaded, make(), 2)) == [None, None]
    assert sorted(ended) == [0, 1]


def test_nothing_runs_any_more_once_it_is_closed(threaded):
    """The bytes that an upload reads may change then."""
    begun, go_on, ended = threading.Event(), threading.Event(), []

    def act():
        begun.set()
        assert go_on.wait(PATIENCE)
        ended.append(True)

    results = in_parallel(threaded, [lambda: None, act], 2)
    next(results)
    assert begun.wait(PATIENCE)
    threading.Timer(0.1, go_on.set).start()
    results.close()
    assert ended
