"""Exclusive creates: lost answers, conflicts, and stores that ignore conditions or look first."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from diloco_core import ConfigurationError, Elastic, StoreExchange, connect
from diloco_core._store._api import creates_once
from diloco_core._store._drivers._fsspec import FsspecDriver
from diloco_core._store._drivers._remote import RemoteStore
from diloco_core._store._open import open_store
from diloco_core._store._transfer import PART_BYTES


class TestCreatesWhoseAnswerIsLost:
    @pytest.mark.parametrize("what", ["lose", 500])
    def test_it_is_ours_if_the_content_is(self, store, small_s3, what):
        small_s3.fail(what, "PUT", part="claim")
        assert store.create("claim", b"mine")
        assert small_s3.objects["run/claim"] == b"mine"

    def test_it_is_not_if_somebody_else_was_first(self, store, small_s3):
        assert store.create("claim", b"theirs")
        small_s3.fail("lose", "PUT", part="claim")
        assert not store.create("claim", b"mine")
        assert store.get("claim") == b"theirs"

    def test_a_conflict_of_two_writers_is_tried_again(self, store, small_s3):
        small_s3.fail(409, "PUT", times=3, part="claim", code="ConditionalRequestConflict")
        assert store.create("claim", b"mine")
        small_s3.objects.clear()
        small_s3.fail(409, "PUT", part="claim", code="ConditionalRequestConflict")
        small_s3.objects["run/claim"] = b"theirs"
        assert not store.create("claim", b"mine")

    def test_a_large_object_counts_as_anothers(self, store, small_s3):
        data = bytes(PART_BYTES + 1)
        small_s3.fail("lose", "PUT", part="claim")
        assert not store.create("claim", data)
        assert store.get("claim") == data

    def test_it_exists_and_is_gone_before_it_is_read(self, store, small_s3):
        small_s3.objects["run/claim"] = b"theirs"
        small_s3.fail(404, "GET", part="claim", code="NoSuchKey")
        assert not store.create("claim", b"mine")


def test_a_store_that_ignores_conditions_is_found_out(store, small_s3):
    small_s3.conditions = False
    assert store.create("k", b"first")
    assert store.create("k", b"second"), "it says it wrote, and it did: over the first"
    assert not creates_once(store)
    assert [key for key in small_s3.objects if "probes" in key] == []


@pytest.mark.parametrize("when", ["it opens", "it creates", "an answer is lost"])
def test_a_bit_that_flips_on_its_way_is_no_fault_of_the_store(driver, small_s3, when):
    """The first create, if its answer is lost, takes its own object for another one's."""
    probes = {"part": "/bucket/run/probes/"}
    if when == "it opens":
        small_s3.fail("flip", "GET", times=2, **probes)
    store = RemoteStore("s3://bucket/run", driver)
    if when == "an answer is lost":
        small_s3.fail("lose", "PUT", **probes)
    small_s3.fail("flip", "GET", **probes)
    assert creates_once(store)
    assert not any(fault.times for fault in small_s3.faults)
    assert [key for key in small_s3.objects if "probes" in key] == []


def test_a_refusal_that_does_not_say_which_condition_failed(store, small_s3):
    small_s3.says_which = False
    assert store.create("k", b"first")
    assert not store.create("k", b"second")
    assert creates_once(store)


def test_a_driver_that_looks_first_is_refused_to_elastic_runs_only(tmp_path, monkeypatch):
    """A folder through fsspec's driver, which creates as its base class does."""
    monkeypatch.setitem(fsspec.config.conf, "local", {"auto_mkdir": True})
    looks_first = f"local://{tmp_path}/run"
    store = open_store(looks_first)
    assert store.create("k", b"first")
    assert not store.create("k", b"second")
    assert not creates_once(store)
    for enter in (
        lambda: StoreExchange(open_store(looks_first), 0, 2, Elastic(1)),
        lambda: connect(looks_first, rank=0, world_size=2, min_replicas=1),
    ):
        with pytest.raises(ConfigurationError, match="exclusive creation, or fixed membership"):
            enter()
    assert connect(looks_first, rank=0, world_size=2).world_size == 2


def test_drivers_that_send_conditions_are_known(small_s3):
    assert FsspecDriver("s3://bucket/run").exclusive
    assert FsspecDriver("memory://run").exclusive
    # A wrapper has its own way to write, whatever it wraps.
    assert not FsspecDriver("simplecache::memory://run").exclusive


@pytest.mark.parametrize("size", [1, 2**24])
def test_two_that_look_into_memory_at_once_do_not_both_create(monkeypatch, size):
    both, real = threading.Barrier(2), MemoryFileSystem.exists

    def exists(self, path, **options):
        found = real(self, path, **options)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # for the other to look too: it must not before this one has written
        return found

    stores = [open_store(f"memory://exclusive-{size}/run") for _ in range(2)]
    monkeypatch.setattr(MemoryFileSystem, "exists", exists)
    with ThreadPoolExecutor(2) as pool:
        won = pool.map(lambda store, who: store.create("k", who * size), stores, [b"a", b"b"])
    assert sorted(won) == [False, True]
