"""The manifest disappears or changes: living replicas put it back, or stop at another run's."""

import itertools
import logging

import pytest
from damage_lab import Watched, store_of
from simulated import SimulatedTraining, simulate, violations

from diloco_core import CorruptedObjectError, Elastic, FormatError, RunExistsError
from diloco_core._run._records._keys import MANIFEST, commit_key
from diloco_core._run._records._manifest import Manifest
from diloco_core._store._api import RECORD_BYTES


def _meddled(sync, meddle):
    """A store for which ``meddle(store)`` is called right after a sync was decided."""

    def after(key, data):
        if key == commit_key(sync) and meddle is not None:
            meddle(store)

    store = Watched(after)
    return store


def _run(
    meddle=None, sync=4, syncs=9, grace=5.0, store=None, before=None, before_create=None, **options
):
    """A run and its training; ``before_create`` is called before the manifest is created."""
    salts = {} if before is None else dict(before.salts)
    training = SimulatedTraining(syncs=syncs, sizes=(12,), salts=salts)
    store = _meddled(sync, meddle) if store is None else store
    settings = Elastic(2, grace=grace, topology="sharded", **options)

    def prepare(node):
        if before_create is not None:
            node.before("create", lambda key: before_create() if key == MANIFEST else None)

    options = {"store": store, "most_incarnations": 1, "limit": 500.0, "prepare": prepare}
    return simulate(training, 2, settings, **options), training


def _errors(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


COPY = "manifest.copy.json"
_HARMS = {
    "gone": lambda store, key: store.remove(key),
    "cut short": lambda store, key: store.damage(key, store.objects[key][:90]),
    "empty": lambda store, key: store.damage(key, b""),
    "too large": lambda store, key: store.damage(key, bytes(RECORD_BYTES + 1)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("harm", _HARMS)
@pytest.mark.parametrize(
    ("key", "sync", "grace"), [(MANIFEST, 4, 5.0), (MANIFEST, 9, 5.0), (COPY, 4, 1.0)]
)
def test_it_and_its_copy_are_written_again_with_the_same_content(key, harm, sync, grace, caplog):
    """Within a grace, at the next eighth sync, or when the replicas leave."""
    outcome, training = _run(lambda store: _HARMS[harm](store, key), sync, grace=grace)
    assert violations(outcome, training) == []
    assert outcome.store.objects[key] == outcome.store.decided[MANIFEST]
    assert 1 <= len(_errors(caplog)) <= 2
    damage = f"{key} is gone" if harm == "gone" else key
    assert all(damage in text and "Writing it again" in text for text in _errors(caplog))
    outcome, again = _run(syncs=11, store=outcome.store, before=training)
    assert violations(outcome, again) == []


@pytest.mark.sampled
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


@pytest.mark.sampled
@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("harm", _HARMS)
def test_without_both_the_error_says_what_to_do(harm, resume):
    store = _run(syncs=1)[0].store
    _HARMS[harm](store, MANIFEST)
    store.damage(COPY, store.objects[COPY][:90])
    before = dict(store.objects)
    outcome, _ = _run(store=store, resume=resume)
    assert store.objects == before
    kind = RunExistsError if harm == "gone" else CorruptedObjectError
    for rank in (0, 1):
        error = outcome.results[rank, 1]
        assert type(error) is kind
        assert "copy" in str(error)
        assert "on another prefix" in str(error) or "use another prefix" in str(error)
        for words in ("'newest-whole' does not help", "from a backup", "start this one later"):
            assert harm == "gone" or words in str(error).lower()


def test_another_run_that_begins_meanwhile_stays():
    """Another run begins between finding the manifest gone and restoring it from its copy."""
    store, foreign = (_run(syncs=1)[0].store for _ in range(2))
    manifest = foreign.objects[MANIFEST]
    store.remove(MANIFEST)
    outcome, _ = _run(store=store, before_create=lambda: store.damage(MANIFEST, manifest))
    assert {type(error) for error in outcome.errors().values()} == {RunExistsError}
    assert store.objects[MANIFEST] == manifest


def test_a_copy_alone_is_a_leftover():
    """Somebody empties the prefix, and stops before the last object."""
    first, _ = _run(syncs=1)
    store = store_of({COPY: first.store.objects[COPY]})
    outcome, training = _run(store=store)
    assert violations(outcome, training) == []
    assert store.objects[COPY] == store.objects[MANIFEST] == store.decided[MANIFEST]
    assert store.objects[COPY] != first.store.objects[COPY]


def test_who_dies_before_it_has_written_the_copy_leaves_no_other_one():
    """A copy that was left of an earlier run would be believed if the manifest was lost."""
    first, _ = _run(syncs=1)
    seen = []
    store = Watched(lambda key, data: seen.extend([COPY in store.objects] * (key == MANIFEST)))
    store.write(COPY, first.store.objects[COPY])
    _run(store=store)
    assert seen == [False]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda data: _run(syncs=1)[0].store.objects[MANIFEST], RunExistsError),
        (lambda data: b'{"kind": "manifest", "format": 2}', FormatError),
    ],
    ids=["another", "another format"],
)
def test_where_another_run_stands_nobody_goes_on(change, kind):
    foreign = []

    def meddle(store):
        foreign.append(change(store.objects[MANIFEST]))
        store.damage(MANIFEST, foreign[0])

    outcome, _ = _run(meddle)
    assert {type(error) for error in outcome.errors().values()} == {kind}
    assert [outcome.store.objects[MANIFEST]] == foreign
    named = ("now belongs to another run", "format")
    assert any(text in str(outcome.results[0, 1]) for text in named)
    assert commit_key(9) not in outcome.store.objects


def test_somebody_else_is_faster():
    """Between looking and writing, another run begins there."""
    first, _ = _run(syncs=1)
    foreign = first.store.objects[MANIFEST]
    assert Manifest.from_json(foreign, "").world_size == 2
    store = _meddled(4, lambda store: store.remove(MANIFEST))

    def faster():
        if commit_key(4) in store.objects:
            store.damage(MANIFEST, foreign)

    outcome, _ = _run(store=store, before_create=faster)
    assert {type(error) for error in outcome.errors().values()} == {RunExistsError}
    assert store.objects[MANIFEST] == foreign


@pytest.mark.parametrize("grace", [5.0, 500.0])
def test_how_often_it_is_read(grace):
    reads = []

    def counting(node):
        clock = node.connection.clock
        node.before("get", lambda key: reads.extend([clock()] * (key == MANIFEST)))

    training, settings = SimulatedTraining(syncs=20, sizes=(12,)), Elastic(1, grace=grace)
    simulate(training, 1, settings, prepare=counting)
    begun = sum(time < 1.0 for time in reads)
    assert begun in {2, 3}, "reading it until it is there"
    if grace > 100.0:
        assert len(reads) == begun + 20 // 8 + 1
    else:  # a sync comes every two seconds
        assert all(later - earlier < grace + 3.0 for earlier, later in itertools.pairwise(reads))
        assert len(reads) <= begun + 20 // 8 + 1 + 45.0 / grace
