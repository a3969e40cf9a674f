"""Records of the log that are lost: nothing is decided twice, and a run gets on."""

from dataclasses import replace

import pytest
from damage_lab import asleep_after, run_of
from simulated import Schedule, SimulatedStore, SimulatedTraining, once, simulate, violations

from diloco_core import CorruptedObjectError, Elastic, FencedError
from diloco_core._arithmetic._contribution import Contribution
from diloco_core._run._records._keys import commit_key, commit_sync
from diloco_core._run._records._records import Rollback, read_record
from diloco_core._run._states import _rollback
from diloco_core._run._sync import _catchup

_SETTINGS = Elastic(1, grace=5.0, topology="gather", publish_every=3, retention=4)
_SHARDED = replace(_SETTINGS, topology="sharded", publish_every=None)


def _run(syncs, sizes=(40,), settings=_SETTINGS, ranks=1):
    """A run that dies after so many syncs."""
    training, store = SimulatedTraining(syncs=syncs, sizes=sizes), SimulatedStore()

    def dies(node):
        node.exchange.leave = lambda: None

    options = {"store": store, "most_incarnations": 1, "prepare": dies}
    simulate(training, ranks, settings, **options)
    return training, store


def _resume(before, store, syncs, resume, settings=_SETTINGS, prepare=None):
    training = SimulatedTraining(syncs=syncs, sizes=before.sizes, salts=dict(before.salts))
    schedule, settings = Schedule(1, latency=0.01), replace(settings, resume=resume)
    options = {"store": store, "most_incarnations": 1, "prepare": prepare}
    return simulate(training, schedule, settings, **options), training


def _lose(store, *syncs):
    for sync in syncs:
        store.remove(commit_key(sync))
        del store.decided[commit_key(sync)]


def _damage(store, *syncs):
    """Nothing is left of what was published of some syncs, nor of the contributions to them."""
    for sync in syncs:
        for key in list(store.objects):
            if key.startswith((f"state/{sync:08}/", f"deltas/{sync:08}/")):
                store.damage(key, b"")


def _rollbacks(store):
    log = {sync: read_record(store.objects[commit_key(sync)], sync, "") for sync in _numbers(store)}
    return [record for _, record in sorted(log.items()) if isinstance(record, Rollback)]


def _numbers(store):
    return sorted(filter(None, map(commit_sync, store.objects)))


def test_a_lost_record_in_the_middle_of_the_log_does_not_end_the_run():
    before, store = _run(8)
    _lose(store, 7)
    outcome, training = _resume(before, store, 9, "newest-whole")
    assert violations(outcome, training) == []
    fence = {0: 2}
    decided = Rollback(9, (6,), (7, 8), fence, run=run_of(store))
    assert _rollbacks(store) == [Rollback(7, (6,), (), fence, run=run_of(store)), decided]
    _lose(store, 7)  # as where it was killed before it could close that number
    outcome, later = _resume(training, store, 11, resume=True)
    assert violations(outcome, later) == []
    assert _rollbacks(store) == [Rollback(7, (6,), (), fence, run=run_of(store)), decided]


def test_numbers_before_a_later_record_are_not_decided_again():
    settings = replace(_SETTINGS, publish_every=4)
    before, store = _run(7, settings=settings)
    _lose(store, 5, 6)
    outcome, training = _resume(before, store, 9, True, settings)
    assert "commits/00000005.json is gone, although later objects are there" in str(
        outcome.results[0, 1]
    )
    assert _numbers(store) == [1, 2, 3, 4, 7]
    outcome, training = _resume(training, store, 9, "newest-whole", settings)
    assert violations(outcome, training) == []
    assert [(record.sync, record.states, record.given_up) for record in _rollbacks(store)] == [
        (5, (4,), ()),
        (6, (4,), ()),
        (8, (4,), (5, 6, 7)),
    ]


@pytest.mark.parametrize("still_counts", [True, False])
def test_a_number_is_closed_by_what_can_be_read(still_counts):
    """One of two fragments' newest states is unreadable now; the other's sync may count."""
    before, store = _run(8, (40, 30), _SHARDED)
    last = _numbers(store)[-1]
    whole = store.objects[commit_key(last)]
    _lose(store, last if still_counts else last - 1)
    _damage(store, last - 1)
    outcome, training = _resume(before, store, 8, "newest-whole", _SHARDED)
    assert violations(outcome, training) == []
    fence = {0: 2}
    index = (last - 1) % 2
    states = [(last, last - 3), (last - 2, last - 3)]
    states = [pair if index == 0 else pair[::-1] for pair in states]
    decided = Rollback(last + 1, states[0], (last - 1,), fence, run=run_of(store))
    closing = [] if still_counts else [Rollback(last - 1, states[1], (), fence, run=run_of(store))]
    assert _rollbacks(store) == [*closing, decided]
    assert store.objects[commit_key(last)] == whole


def test_two_incarnations_that_go_back_at_the_same_time():
    """One meets the other's rollback while it looks which states are whole, and looks again."""
    before, store = _run(4, settings=_SHARDED)
    _lose(store, 4)
    _damage(store, 4)
    opened = []

    def meanwhile(key):
        if key.startswith("state/00000003/000.0") and not opened:
            opened.append(key)
            for sync, given_up in ((5, (4,)), (4, ())):
                record = Rollback(sync, (3,), given_up, {0: 2}, run=run_of(store))
                store.write(commit_key(sync), record.to_json())

    outcome, training = _resume(
        before, store, 5, "newest-whole", _SHARDED, lambda node: node.before("open", meanwhile)
    )
    assert violations(outcome, training) == []
    assert opened
    assert [record.sync for record in _rollbacks(store)] == [4, 5]


def test_a_number_that_is_closed_is_no_state():
    before, store = _run(5, settings=_SHARDED)
    _lose(store, 4)
    _damage(store, 4, 5)
    store.write(commit_key(4), Rollback(4, (3,), (), {0: 1}, run=run_of(store)).to_json())
    store.write(commit_key(6), Rollback(6, (3,), (4, 5), {0: 1}, run=run_of(store)).to_json())
    store.damage(commit_key(6), b"")
    outcome, training = _resume(before, store, 5, "newest-whole", _SHARDED)
    assert violations(outcome, training) == []
    assert read_record(store.objects[commit_key(7)], 7, "") == Rollback(
        7, (3,), (4, 5, 6), {0: 2}, run=run_of(store)
    )


@pytest.mark.parametrize("agreed", [True, False])
def test_who_begins_meanwhile_stops_unless_it_has_agreed(agreed):
    before, store = _run(6, settings=_SHARDED, ranks=2)
    for key in list(store.objects):
        if key.startswith(("state/00000006/00", "deltas/00000006/")):
            store.damage(key, b"")
    training = SimulatedTraining(syncs=7, sizes=(40,), salts=dict(before.salts))

    def train(node):
        resume = "newest-whole" if node.rank == 0 or agreed else True
        grace = 5.0 + 60.0 * node.rank
        node.exchange.settings = replace(_SHARDED, resume=resume, grace=grace)
        return training(node)

    schedule = Schedule(2, latency=0.01, starts=[0.0, 1.0])
    outcome = once(train, schedule, _SHARDED, store=store)
    assert [record.sync for record in _rollbacks(store)] == [7]
    wrong = violations(outcome, training)
    assert all("not every rank came to the end" in what for what in wrong)
    assert outcome.finished == agreed
    assert isinstance(outcome.results[1, 1], FencedError) != agreed


def test_a_rollback_that_has_brought_nothing_is_not_written_again(monkeypatch):
    before, store = _run(8)
    _lose(store, 7)
    take = _catchup._take_newest

    def nothing_helps(incarnation):
        take(incarnation)
        return CorruptedObjectError("this is damaged for another reason")

    monkeypatch.setattr(_catchup, "_take_newest", nothing_helps)
    for _ in range(2):
        outcome, _ = _resume(before, store, 9, "newest-whole")
        assert "this is damaged for another reason" in str(outcome.results[0, 1])
        assert _numbers(store) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_who_finds_nothing_whole_looks_whether_others_have_gone_on(monkeypatch):
    """It slept meanwhile, and what it would look at has been removed."""
    before, store = _run(4, settings=_SHARDED)
    _damage(store, 4)
    is_whole = _rollback._is_whole

    def slept(*args):
        if commit_key(5) in store.objects:
            return is_whole(*args)
        if args[2] == 0:
            store.write(commit_key(5), Rollback(5, (3,), (4,), {0: 2}, run=run_of(store)).to_json())
        return False

    monkeypatch.setattr(_rollback, "_is_whole", slept)
    outcome, training = _resume(before, store, 5, "newest-whole", _SHARDED)
    assert violations(outcome, training) == []


KEY = commit_key(3)
ALONE = Elastic(1, grace=5.0, topology="sharded")


def back_to(sync, number, store):
    """A rollback that another incarnation has decided."""
    return Rollback(number, (sync,), (), {0: 1}, run=run_of(store)).to_json()


def lost(store, connection):
    store.remove(KEY)


def replaced(store, connection):
    """It was lost without a trace, and a rollback has its number."""
    store.damage(KEY, back_to(2, 3, store))


def raced(store, connection):
    """A rollback takes its number in the moment in which it is to be written again."""
    create, record = connection.create, back_to(2, 3, store)
    store.remove(KEY)
    store.decided.pop(KEY)

    def late(key, data):
        if key == KEY:
            store.write(KEY, record)
        return create(key, data)

    connection.create = late


def followed(store, connection):
    """A rollback has the number of the next sync."""
    store.write(commit_key(4), back_to(2, 4, store))


@pytest.mark.parametrize("meddle", [lost, replaced, raced, followed])
def test_a_sleeper_looks_what_has_become_of_its_record(meddle):
    """It would decide the next sync, and has not agreed to go back."""
    training, store, records = SimulatedTraining(syncs=6, sizes=(40,)), SimulatedStore(), []

    def wake(node):
        records.append(store.objects[KEY])
        meddle(store, node.connection)
        records.append(store.objects.get(KEY))
        assert node.exchange.behind() == (meddle is followed)

    outcome = once(training, 1, ALONE, store=store, prepare=asleep_after(3, wake))
    if meddle is lost:
        assert violations(outcome, training) == []
        assert store.objects[KEY] == records[0]
        return
    assert isinstance(outcome.results[0, 1], FencedError)
    assert store.objects[KEY] == (back_to(2, 3, store) if meddle is raced else records[-1])
    assert store.changed == []


def test_a_sync_that_meets_a_rollback_ends_with_it():
    """Between its halves others have gone back, and this incarnation has not agreed to that."""
    training, store = SimulatedTraining(syncs=3, sizes=(40,)), SimulatedStore()

    def train(node):
        node.exchange.leave = lambda: None
        training(node)
        job = node.exchange._incarnation.fragments[0].job
        job.contribution = Contribution(steps=(12, 16))
        job.begin()
        pending = node.exchange.begin(job)
        store.write(commit_key(4), back_to(2, 4, store))
        pending.finish()

    outcome = once(train, 1, ALONE, store=store)
    assert isinstance(outcome.results[0, 1], FencedError)
    assert "began before that, so it stops" in str(outcome.results[0, 1])
