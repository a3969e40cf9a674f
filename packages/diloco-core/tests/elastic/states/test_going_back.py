"""Test what a user sees of a run that has gone back: outer steps, and the place in the data."""

import logging
from dataclasses import replace

import pytest
from damage_lab import Watched, run_of
from rollback_lab import rollbacks_in
from simulated import (
    OtherTraining,
    SimulatedStore,
    SimulatedTraining,
    flawless,
    once,
    simulate,
    violations,
)

from diloco_core import CoreError, CorruptedObjectError, Elastic
from diloco_core._run._records._keys import commit_key, inner_key
from diloco_core._run._records._records import Rollback
from diloco_core._run._states import _kept, _rollback

_LAST = 4  # the sync that is lost
_ELASTIC = {"min_replicas": 1, "grace": 5.0, "topology": "sharded"}


def _go_on(store, syncs, before=None, resume="newest-whole"):
    salts = {} if before is None else before.salts
    training = SimulatedTraining(syncs=syncs, sizes=(40,), save_every=1, salts=salts)
    settings = Elastic(**_ELASTIC, resume=resume)
    flawless(training, 1, settings, store=store, most_incarnations=1)
    return training


@pytest.fixture
def lost():
    """A run of four syncs whose last one nothing can compute again, and all that it has written."""
    kept = {}
    store = Watched(kept.__setitem__)
    training = _go_on(store, _LAST, resume=False)
    for key in list(store.objects):
        if key.startswith((f"deltas/{_LAST:08}/", f"state/{_LAST:08}/000.0")):
            store.damage(key, store.objects[key][:50])
    return store, training, kept


def _learned(training):
    """The batches that were learned, if each was that of its step."""
    assert all(step == batch for (_, _, step), batch in training.batches.items())
    return sorted(training.batches.values())


def test_what_was_given_up_does_not_count(lost):
    store, before, _ = lost
    training = _go_on(store, 6, before)
    assert rollbacks_in(store) == [Rollback(5, (3,), (4,), {0: 2}, run=run_of(store))]
    reports = training.reports[0, 1]
    assert [report.sync for report in reports if report.committed] == [4, 5, 6]
    assert sorted(training.states) == [6, 7, 8], "in the log they have other numbers"
    assert commit_key(9) not in store.objects
    again = _go_on(store, 8, training, resume=True)
    assert [report.sync for report in again.reports[0, 1] if report.committed] == [7, 8]


def test_the_batches_of_what_was_given_up_are_learned_again(lost, caplog):
    """The data loader passes over what the state has counted."""
    store, before, _ = lost
    caplog.set_level(logging.WARNING)
    training = _go_on(store, 6, before)
    assert "was saved after sync 4, which the run has since given up" in caplog.text
    assert "rank 0: this replica continues with a fresh inner state" in caplog.text
    assert "skip the 6 batches" in caplog.text
    assert _learned(training) == [*range(6, 12)]


def test_what_was_saved_before_is_taken_where_it_is_still_there(lost, caplog):
    store, before, kept = lost
    older = inner_key(0, 1, 2)
    store.write(older, kept[older])  # as where a replica dies while it saves
    caplog.set_level(logging.WARNING)
    training = _go_on(store, 6, before)
    message = "rank 0: restored the inner state that was saved after sync 2 instead. Skip 2 batches"
    assert message in caplog.text
    assert _learned(training) == [*range(6, 12)]


def test_only_what_was_saved_since_is_taken(lost, caplog):
    store, before, kept = lost
    training = _go_on(store, 6, before)
    caplog.clear()
    caplog.set_level(logging.WARNING)
    assert [key for key in store.objects if key.startswith("inner/")] == [inner_key(0, 2, 8)]
    store.damage(inner_key(0, 2, 8), b"rot")
    stale = inner_key(0, 1, 4)
    store.write(stale, kept[stale])
    again = _go_on(store, 8, training, resume=True)
    reason = "is not restored: it was saved after sync 4, which the run has since given up"
    assert f"{stale} {reason}" in caplog.text
    assert _learned(again) == [*range(12, 16)]
    caplog.clear()
    last = _go_on(store, 10, again, resume=True)
    assert "inner state" not in caplog.text, "the newest is of use"
    assert _learned(last) == [*range(16, 20)]


def test_without_the_record_of_the_rollback(lost, caplog):
    store, before, kept = lost
    training = _go_on(store, 6, before)
    store.damage(inner_key(0, 2, 8), b"rot")
    store.write(inner_key(0, 1, 2), kept[inner_key(0, 1, 2)])
    store.damage(commit_key(5), b"rot")
    again = _go_on(store, 8, training, resume=True)
    assert "rank 0: this replica continues with a fresh inner state" in caplog.text
    assert _learned(again) == [*range(12, 16)]


@pytest.mark.sampled
@pytest.mark.parametrize("when", ["commits/00000005", "deltas/00000006", "commits/00000006"])
@pytest.mark.parametrize("state", [2, 0])
def test_a_state_survives_a_late_collection(publishing, when, state, caplog):
    """An incarnation that hangs may have listed it for deletion, and delete it at any time."""
    settings = publishing(1, grace=5.0, retention=1)
    planned, hangs = [], [True]

    class Hung(SimulatedStore):
        """Its collections do not arrive, and then all at once."""

        def remove(self, key):
            if not hangs or not key.startswith(("state/", "initial/", "deltas/")):
                super().remove(key)

        def write(self, key, data):
            super().write(key, data)
            if key.startswith(when):
                for late in planned:
                    self.remove(late)
                planned.clear()

    store = Hung()
    before = SimulatedTraining(syncs=4, sizes=(40,))
    assert simulate(before, 1, settings, store=store).finished
    hangs.clear()
    keep = f"state/{state:08}/" if state else "initial/"
    for key in list(store.objects):
        if key.startswith(("state/", "initial/", "deltas/")) and not key.startswith(keep):
            store.damage(key, store.objects[key][:50])
    planned += [key for key in store.objects if key.startswith(keep)]
    training = SimulatedTraining(syncs=7, sizes=(40,), salts=dict(before.salts))
    going_back = replace(settings, resume="newest-whole")
    flawless(training, 1, going_back, store=store, most_incarnations=1)
    assert [record.states for record in rollbacks_in(store)] == [(state,)]
    assert not planned
    assert not store.below("kept/"), "later it is not needed any more"
    # Who has loaded it holds the outer state of its shards, too, and needs nothing of it any more.
    assert ("again from its copy" in caplog.text) == (when == "commits/00000005")


def _given_up_twice():
    """A run of six syncs of which nothing can compute the last two again, and its settings."""
    before, store = SimulatedTraining(syncs=6, sizes=(40,)), SimulatedStore()
    settings = Elastic(**_ELASTIC, retention=4)
    assert simulate(before, 1, settings, store=store).finished
    for key in list(store.objects):
        if key.startswith(("state/00000005/000.0", "state/00000006/000.0")):
            store.damage(key, b"")
        elif key.startswith(("deltas/00000005/", "deltas/00000006/")):
            store.remove(key)
    return before, store, settings


def test_only_what_is_whole_is_copied(lost, monkeypatch):
    """It has been verified, and rots before it is read once more."""
    store, before, _ = lost
    key, kept = "state/00000003/000.00000.safetensors", []

    def keep(incarnation, index, sync):
        store.damage(key, store.objects[key][:-9])
        kept.append(_kept.keep(incarnation, index, sync))
        return kept[-1]

    monkeypatch.setattr(_rollback, "keep", keep)
    monkeypatch.setattr(_rollback.History, "given_up", lambda *_: [4, 4])
    training = SimulatedTraining(syncs=6, sizes=(40,), salts=dict(before.salts))
    once(training, 1, Elastic(**_ELASTIC, resume="newest-whole"), store=store)
    assert not kept[0]
    assert f"kept/{key}" not in store.objects


def test_a_copy_under_the_key_of_another_run_is_not_written_again(lost):
    store, before, written = lost
    training = _go_on(store, 6, before)
    (initial,) = (key for key in written if key.startswith("initial/"))
    other = f"initial/{16 * '0'}/000.00000.safetensors"
    store.write(f"kept/{other}", written[initial])
    _go_on(store, 8, training, resume=True)
    assert other not in written


def _of_another_run(key):
    settings, store = Elastic(**_ELASTIC, retention=4), SimulatedStore()
    training = OtherTraining(syncs=6, sizes=(40,))
    simulate(training, 1, settings, store=store)
    return store.objects[key]


HOW = ["damaged", "gone", "its header", "its copy too", "the header of its copy too"]


@pytest.mark.sampled
@pytest.mark.parametrize("what", ["000.00000.safetensors", "000.done.json"])
@pytest.mark.parametrize("how", [*HOW, "its copy is huge", "its copy is of another run"])
def test_a_copy_takes_the_place_of_what_is_damaged(what, how, caplog):
    before, store, settings = _given_up_twice()
    training = SimulatedTraining(syncs=0, sizes=(40,), salts=dict(before.salts))
    going_back = replace(settings, resume="newest-whole")
    assert once(training, 1, going_back, store=store).finished
    key = f"state/00000004/{what}"
    whole = store.objects[key]
    assert store.objects[f"kept/{key}"] == whole
    is_gone, is_strange = how == "gone", how.startswith("its copy is")
    made_of = ("state/00000003/", "deltas/00000004/", *([key] * (is_gone or is_strange)))
    for other in [other for other in store.objects if other.startswith(made_of)]:
        store.remove(other)  # it cannot be made again otherwise
    header = whole[:20] + bytes([whole[20] ^ 1]) + whole[21:]
    if key in store.objects:
        store.damage(key, header if how == "its header" else whole[:40])
    copies = {
        "its copy too": whole[:-1],
        "the header of its copy too": header,
        "its copy is huge": whole,
        "its copy is of another run": b"" if "another run" not in how else _of_another_run(key),
    }
    if how in copies:
        store.damage(f"kept/{key}", copies[how])
    later = SimulatedTraining(syncs=6, sizes=(40,), salts=dict(training.salts))

    def prepare(node):
        real = node.connection.open

        def huge(key, *args):
            reader = real(key, *args)
            if key.startswith("kept/") and how == "its copy is huge":
                reader.size = 2**50
            return reader

        node.connection.open = huge

    outcome = once(later, 1, replace(settings, resume=True), store=store, prepare=prepare)
    if is_strange:  # nobody reads all of what is huge
        assert store.objects.get(key) != copies["its copy is of another run"]
        assert all(isinstance(error, CoreError) for error in outcome.errors().values())
        wrong = violations(outcome, later)
        assert all(" raised " in what or "not every rank" in what for what in wrong)
        return
    if how in copies and what.endswith("safetensors"):
        assert isinstance(outcome.results[0, 1], CorruptedObjectError)
        assert store.objects[key] == whole[:40], "what is damaged itself takes nobody's place"
        return
    assert violations(outcome, later) == []
    # A damaged record is made again from the others first.
    assert (f"{key} again from its copy" in caplog.text) == (
        is_gone or what.endswith("safetensors")
    )
