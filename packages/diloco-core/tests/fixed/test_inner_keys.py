"""What incarnations of one rank save of their inner state in a fixed run, under which keys, and
what each of them deletes.
"""

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
class Incarnation:
    """What saving needs of an incarnation.

    Its claim is taken for valid, as by a process that hangs after it has looked at it.
    """

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
def incarnations(monkeypatch, tmp_path):
    """Two incarnations of one rank."""
    monkeypatch.setattr(_inner, "check_claim", lambda incarnation: None)
    monkeypatch.setattr(_inner, "check_run", lambda incarnation: None)
    monkeypatch.setattr(_inner, "_read", lambda incarnation, key: incarnation.store.get(key))
    timing = Timing(sleep=lambda seconds: None)
    store = open_store(str(tmp_path))
    first = Incarnation(Patient(store, timing), timing)
    yield first, replace(first, epoch=2)
    store.close()


def save(incarnation, sync):
    save_inner(
        replace(incarnation, sync=sync),
        lambda identity: [f"of incarnation {incarnation.epoch}".encode()],
    )


def saves(incarnation):
    """For each save, the sync, and the incarnation that has made it."""
    kept = map(keys_lab.kept, incarnation.store.list("inner/"))
    return sorted((saved.sync, saved.incarnation) for saved in kept)


def test_of_one_sync_that_of_the_newest_incarnation_counts_and_the_one_before_stays(incarnations):
    first, second = incarnations
    save(first, 4)
    save(first, 5)
    save(second, 5)
    assert saves(second) == [(4, 1), (5, 2)]
    assert [each.data for each in saved(second, parse_inner)] == [
        b"of incarnation 2",
        b"of incarnation 1",
    ]


def test_a_process_that_wakes_up_late_leaves_what_a_later_incarnation_has_saved(incarnations):
    first, second = incarnations
    save(first, 4)
    save(second, 5)
    save(first, 5)
    assert (5, 2) in saves(first)
    save(first, 6)
    assert (5, 2) in saves(first)
    assert next(saved(second, parse_inner)).data == b"of incarnation 2", (
        "whatever is of a later sync"
    )
    save(second, 6)
    assert saves(second)[-1] == (6, 2)
    assert next(saved(second, parse_inner)).sync == 6


def test_of_earlier_syncs_one_stays_to_which_the_run_may_go_back(incarnations):
    first, _ = incarnations
    for sync in range(1, 6):
        save(first, sync)
    assert saves(first) == [(4, 1), (5, 1)]
