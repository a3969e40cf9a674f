"""Creation in two steps: some drivers look first and write then, which no probe finds out."""

import contextlib
import threading

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from diloco_core import ConfigurationError, Elastic, StoreExchange, connect
from diloco_core._store._api import creates_once
from diloco_core._store._drivers._fsspec import FsspecDriver
from diloco_core._store._open import open_store


@pytest.fixture
def looks_first(tmp_path, monkeypatch):
    """Return the URI of a folder through fsspec's driver, which creates as its base class does."""
    monkeypatch.setitem(fsspec.config.conf, "local", {"auto_mkdir": True})
    return f"local://{tmp_path}/run"


def test_one_create_after_the_other_cannot_tell_but_the_driver_knows(looks_first):
    store = open_store(looks_first)
    assert store.create("k", b"first")
    assert not store.create("k", b"second")
    assert not creates_once(store)


def test_it_is_refused_to_elastic_runs_only(looks_first):
    with pytest.raises(
        ConfigurationError, match="Use a store with exclusive creation, or fixed membership"
    ):
        StoreExchange(open_store(looks_first), 0, 2, Elastic(1))
    with pytest.raises(ConfigurationError, match="exclusive creation"):
        connect(looks_first, rank=0, world_size=2, min_replicas=1)
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
            both.wait(
                0.2
            )  # for the other to look too, which it must not before this one has written
        return found

    stores = [open_store(f"memory://exclusive-{size}/run") for _ in range(2)]
    monkeypatch.setattr(MemoryFileSystem, "exists", exists)
    won = []
    threads = [
        threading.Thread(
            target=lambda who=who, store=store: won.append(store.create("k", bytes([who]) * size))
        )
        for who, store in enumerate(stores)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False, True]
