"""What lives of one rank save of their inner state in a fixed run, under which keys, and what each of them deletes."""

from dataclasses import dataclass, replace

import keys_lab
import pytest

from diloco_core import Timing
from diloco_core._run import _inner
from diloco_core._run._inner import save_inner, saved
from diloco_core._run._records._keys import parse_inner
from diloco_core._store._open import open_store
from diloco_core._store._patient import Patient


@dataclass
class Life:
    """What saving needs of a life. Its claim is taken for valid, as by a process that hangs after it has looked at it."""

    store: Patient
    timing: Timing
    epoch: int = 1
    sync: int = 0
    rank: int = 0
    fixed: bool = True

    def bound(self, key):
        return key

    def origin(self, key):
        return key


@pytest.fixture
def lives(monkeypatch, tmp_path):
    """Two lives of one rank."""
    monkeypatch.setattr(_inner, "check_claim", lambda life: None)
    monkeypatch.setattr(_inner, "check_run", lambda life: None)
    monkeypatch.setattr(_inner, "_read", lambda life, key: life.store.get(key))
    timing = Timing(sleep=lambda seconds: None)
    store = open_store(str(tmp_path))
    first = Life(Patient(store, timing), timing)
    yield first, replace(first, epoch=2)
    store.close()


def save(life, sync):
    save_inner(replace(life, sync=sync), lambda identity: [f"of life {life.epoch}".encode()])


def saves(life):
    """For each save, the sync, and the life that has made it."""
    kept = map(keys_lab.kept, life.store.list("inner/"))
    return sorted((saved.sync, saved.life) for saved in kept)


def test_of_one_sync_that_of_the_newest_life_counts_and_the_one_before_stays(lives):
    first, second = lives
    save(first, 4)
    save(first, 5)
    save(second, 5)
    assert saves(second) == [(4, 1), (5, 2)]
    assert [each.data for each in saved(second, parse_inner)] == [b"of life 2", b"of life 1"]


def test_a_process_that_wakes_up_late_leaves_what_a_later_life_has_saved(lives):
    first, second = lives
    save(first, 4)
    save(second, 5)
    save(first, 5)
    assert (5, 2) in saves(first)
    save(first, 6)
    assert (5, 2) in saves(first)
    assert next(saved(second, parse_inner)).data == b"of life 2", "whatever is of a later sync"
    save(second, 6)
    assert saves(second)[-1] == (6, 2)
    assert next(saved(second, parse_inner)).sync == 6


def test_of_earlier_syncs_one_stays_to_which_the_run_may_go_back(lives):
    first, _ = lives
    for sync in range(1, 6):
        save(first, sync)
    assert saves(first) == [(4, 1), (5, 1)]
