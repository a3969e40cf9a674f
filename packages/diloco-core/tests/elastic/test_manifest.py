"""The manifest disappears or changes while replicas live: they put it back, or stop where another
run's stands there.
"""

import itertools
import logging

import pytest
from keys_lab import sealed_again
from simulated import Schedule, SimulatedStore, SimulatedTraining, simulate, violations

from diloco_core import CorruptedObjectError, Elastic, FormatError, RunExistsError
from diloco_core._run._records._keys import MANIFEST, commit_key
from diloco_core._run._records._manifest import Manifest
from diloco_core._store._api import RECORD_BYTES


class _Meddled(SimulatedStore):
    """``meddle(store)`` is called once, right after a sync was decided."""

    def __init__(self, sync, meddle):
        super().__init__()
        self.sync, self.meddle = sync, meddle

    def write(self, key, data):
        super().write(key, data)
        if key == commit_key(self.sync) and self.meddle is not None:
            meddle, self.meddle = self.meddle, None
            meddle(self)


def _run(meddle=None, sync=4, syncs=9, grace=5.0, store=None, before=None, train=None, **options):
    """A run, and its training; with ``train``, that is called with every node first."""
    salts = {} if before is None else dict(before.salts)
    training = SimulatedTraining(syncs=syncs, sizes=(12,), salts=salts)
    store = _Meddled(sync, meddle) if store is None else store
    settings = Elastic(2, grace=grace, topology="sharded", **options)

    def meddled(node):
        if train is not None:
            train(node)
        return training(node)

    outcome = simulate(
        meddled, Schedule(2, latency=0.01), settings, store=store, most_incarnations=1, limit=500.0
    )
    return outcome, training


def _before_create(node, act):
    """Have ``act()`` called before each attempt to create the manifest."""
    create = node.connection.create

    def slow(key, data):
        if key == MANIFEST:
            act()
        return create(key, data)

    node.connection.create = slow


def _errors(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


@pytest.mark.parametrize(
    ("meddle", "told"),
    [
        (lambda store: store.remove(MANIFEST), "manifest.json is gone"),
        (
            lambda store: store.damage(MANIFEST, store.objects[MANIFEST][:90]),
            "does not end with a checksum",
        ),
        (lambda store: store.damage(MANIFEST, b""), "truncated or damaged"),
    ],
    ids=["gone", "cut short", "empty"],
)
@pytest.mark.parametrize("sync", [4, 9])
def test_it_is_written_again_with_the_same_content(meddle, told, sync, caplog):
    """Within a grace, at the next eighth sync, or when the replicas leave."""
    outcome, training = _run(meddle, sync)
    assert violations(outcome, training) == []
    assert outcome.store.objects[MANIFEST] == outcome.store.decided[MANIFEST]
    assert _errors(caplog)
    assert all(
        told in text and "Writing it again with the same content" in text
        for text in _errors(caplog)
    )
    outcome, again = _run(syncs=11, store=outcome.store, before=training)
    assert violations(outcome, again) == []


def test_it_is_written_again_where_a_grace_is_shorter_than_reading_it_several_times(caplog):
    outcome, training = _run(lambda store: store.damage(MANIFEST, b""), grace=1.0)
    assert violations(outcome, training) == []
    assert outcome.store.objects[MANIFEST] == outcome.store.decided[MANIFEST]
    assert len(_errors(caplog)) <= 2


COPY = "manifest.copy.json"
_HARMS = {
    "gone": lambda store, key: store.remove(key),
    "cut short": lambda store, key: store.damage(key, store.objects[key][:90]),
    "empty": lambda store, key: store.damage(key, b""),
    "too large": lambda store, key: store.damage(key, bytes(RECORD_BYTES + 1)),
}


@pytest.mark.parametrize("harm", _HARMS)
@pytest.mark.parametrize("sync", [4, 9])
def test_so_is_its_copy(harm, sync, caplog):
    outcome, training = _run(lambda store: _HARMS[harm](store, COPY), sync)
    assert violations(outcome, training) == []
    assert outcome.store.objects[COPY] == outcome.store.decided[MANIFEST]
    told = "is gone" if harm == "gone" else "is damaged"
    assert {f"{COPY} {told}. Writing it again" in text for text in _errors(caplog)} == {True}


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("harm", _HARMS)
def test_where_nobody_was_left_to_write_it_again_its_copy_is_enough(harm, resume, caplog):
    outcome, training = _run()
    store = outcome.store
    assert store.objects[COPY] == store.objects[MANIFEST]
    _HARMS[harm](store, MANIFEST)
    outcome, again = _run(syncs=11, store=store, before=training, resume=resume)
    assert violations(outcome, again) == []
    assert store.objects[MANIFEST] == store.decided[MANIFEST]
    assert f"It is written again from its copy {COPY}" in caplog.text


@pytest.mark.parametrize("harm", _HARMS)
def test_without_both_the_error_says_what_to_do(harm):
    store = _run(syncs=1)[0].store
    _HARMS[harm](store, MANIFEST)
    store.damage(COPY, store.objects[COPY][:90])
    outcome, _ = _run(store=store)
    kind = RunExistsError if harm == "gone" else CorruptedObjectError
    for rank in (0, 1):
        error = outcome.results[rank, 1]
        assert type(error) is kind
        assert "copy" in str(error)
        assert "on another prefix" in str(error) or "use another prefix" in str(error)


def test_nothing_is_written_over_what_another_run_has_written_meanwhile():
    """Another run begins between finding the manifest gone and restoring it from its copy."""
    store, foreign = (_run(syncs=1)[0].store for _ in range(2))
    manifest = foreign.objects[MANIFEST]
    store.remove(MANIFEST)
    outcome, _ = _run(
        store=store,
        train=lambda node: _before_create(node, lambda: store.damage(MANIFEST, manifest)),
    )
    assert {type(error) for error in outcome.errors().values()} == {RunExistsError}
    assert store.objects[MANIFEST] == manifest


def test_a_copy_alone_is_a_leftover():
    """Somebody empties the prefix, and stops before the last object."""
    first, _ = _run(syncs=1)
    store = SimulatedStore()
    store.write(COPY, first.store.objects[COPY])
    outcome, training = _run(store=store)
    assert violations(outcome, training) == []
    assert store.objects[COPY] == store.objects[MANIFEST] == store.decided[MANIFEST]
    assert store.objects[COPY] != first.store.objects[COPY]


def test_who_dies_before_it_has_written_the_copy_leaves_no_other_one():
    """A copy that was left of an earlier run would be believed if the manifest was lost."""
    first, _ = _run(syncs=1)
    seen = []

    class Looked(SimulatedStore):
        def write(self, key, data):
            super().write(key, data)
            if key == MANIFEST:
                seen.append(COPY in self.objects)

    store = Looked()
    store.write(COPY, first.store.objects[COPY])
    _run(store=store)
    assert seen == [False]


def test_where_another_run_stands_nobody_goes_on(caplog):
    first, _ = _run(syncs=1)
    foreign = first.store.objects[MANIFEST]

    def replaced(store):
        assert foreign != store.objects[MANIFEST]
        store.damage(MANIFEST, foreign)

    outcome, _ = _run(replaced)
    for rank in (0, 1):
        error = outcome.results[rank, 1]
        assert isinstance(error, RunExistsError)
        assert "now belongs to another run" in str(error)
    assert outcome.store.objects[MANIFEST] == foreign
    assert commit_key(9) not in outcome.store.objects


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda data: sealed_again(MANIFEST, data, membership="strict"), RunExistsError),
        (lambda data: b'{"kind": "manifest", "format": 2}', FormatError),
    ],
    ids=["strict", "another format"],
)
def test_what_it_cannot_read_of_another_run_stays_too(change, kind):
    def meddle(store):
        store.damage(MANIFEST, change(store.objects[MANIFEST]))

    outcome, _ = _run(meddle)
    assert {type(error) for error in outcome.errors().values()} == {kind}
    assert outcome.store.objects[MANIFEST] == change(outcome.store.decided[MANIFEST])


def test_somebody_else_is_faster():
    """Between looking and writing, another run begins there."""
    first, _ = _run(syncs=1)
    foreign = first.store.objects[MANIFEST]
    assert Manifest.from_json(foreign, "").world_size == 2
    store = _Meddled(4, lambda store: store.remove(MANIFEST))

    def faster():
        if commit_key(4) in store.objects:
            store.damage(MANIFEST, foreign)

    outcome, _ = _run(store=store, train=lambda node: _before_create(node, faster))
    assert {type(error) for error in outcome.errors().values()} == {RunExistsError}
    assert store.objects[MANIFEST] == foreign


@pytest.mark.parametrize("grace", [5.0, 500.0])
def test_it_is_read_every_eighth_sync_once_in_a_grace_and_at_the_end_only(grace):
    reads = []

    def train(node):
        get = node.connection.get

        def counted(key, *args, **options):
            if key == MANIFEST:
                reads.append(node.connection.clock())
            return get(key, *args, **options)

        node.connection.get = counted
        return SimulatedTraining(syncs=20, sizes=(12,))(node)

    simulate(train, Schedule(1, latency=0.01), Elastic(1, grace=grace), most_incarnations=1)
    begun = sum(time < 1.0 for time in reads)
    assert begun in {2, 3}, "reading it until it is there"
    if grace > 100.0:
        assert len(reads) == begun + 20 // 8 + 1
    else:  # a sync comes every two seconds
        assert all(later - earlier < grace + 3.0 for earlier, later in itertools.pairwise(reads))
        assert len(reads) <= begun + 20 // 8 + 1 + 45.0 / grace
