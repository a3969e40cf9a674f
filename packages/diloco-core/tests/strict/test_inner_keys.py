"""What lives of one rank save of their inner state, under which keys, and what each of them deletes."""

from dataclasses import replace

import pytest

from diloco_core import Timing
from diloco_core._arithmetic._sharded import Scratch
from diloco_core._store._open import open_store
from diloco_core._store._patient import Patient
from diloco_core._strict._inner import save_inner, saved_inner
from diloco_core._strict._participant import Participant

FIRST, SECOND = 32 * "a", 32 * "b"


@pytest.fixture
def lives(tmp_path):
    """Two lives of one rank. The second one goes on from the state after sync 5."""
    store = open_store(str(tmp_path))
    timing = Timing(sleep=lambda seconds: None)
    patient, scratch = Patient(store, timing), Scratch(64)
    first = Participant(patient, 0, 1, FIRST, timing, None, 64, scratch, lambda: None, lambda: None)
    yield first, replace(first, run=SECOND, earlier=[(FIRST, 5)], life=2)
    store.close()


def save(life, sync):
    save_inner(life, sync, lambda identity: [f"of life {life.life}".encode()])


def saves(life):
    """For each save, the sync, and the life that has made it."""
    listed = (key.removesuffix(".safetensors").split(".") for key in life.store.list("inner/"))
    return sorted((int(key[-8:]), int(number)) for key, _, number in listed)


def test_of_one_sync_that_of_the_newest_life_counts_and_the_one_before_stays(lives):
    first, second = lives
    save(first, 4)
    save(first, 5)
    save(second, 5)
    assert saves(second) == [(4, 1), (5, 2)]
    third = replace(second, run=32 * "c", earlier=[(FIRST, 5), (SECOND, 5)], life=3)
    assert [saved.data for saved in saved_inner(third, 1)] == [b"of life 2", b"of life 1"]


def test_a_process_that_wakes_up_late_leaves_what_a_later_life_has_saved(lives):
    first, second = lives
    save(first, 4)
    save(second, 5)
    save(first, 5)
    save(first, 6)
    assert saves(first) == [(5, 1), (5, 2), (6, 1)]
    third = replace(second, run=32 * "c", earlier=[(FIRST, 5), (SECOND, 5)], life=3)
    counting = [saved.data for saved in saved_inner(third, 1) if saved.data]
    assert counting == [b"of life 2", b"of life 1"]
    save(second, 6)
    assert saves(second) == [(5, 2), (6, 2)]
