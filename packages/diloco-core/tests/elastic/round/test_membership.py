"""Test what an incarnation decides by the contributions to a sync and by its record."""

from dataclasses import replace

import pytest
from simulated import Schedule, SimulatedTraining, once

from diloco_core import Elastic
from diloco_core._run._records._keys import Delta, Hint
from diloco_core._run._records._records import Commit
from diloco_core._run._round._membership import (
    Create,
    Differ,
    Expired,
    KeepWaiting,
    Leave,
    NotNext,
    Obey,
    Round,
    fate,
    on_look,
    on_record,
    read_folder,
)

_BASE, _OTHER, _SCHEMA = "0" * 16, "1" * 16, "f" * 16
_ROUND = Round(
    sync=3,
    rank=0,
    base=_BASE,
    schema=_SCHEMA,
    positions={0: 4, 1: 4, 2: 4},
    size=lambda groups, rank: 100,
    previous="a" * 16,
    members={0: 1, 1: 1, 2: 1},
    min_replicas=2,
)


def _delta(rank, epoch=1, start=4, stop=6, base=_BASE):
    return Delta(3, rank, epoch, start, stop, base, _SCHEMA)


def _look(*seen, overdue=False, expired=False, **changes):
    at = replace(_ROUND, **changes)
    folder = read_folder(at, {each.key: 100 for each in seen})
    return on_look(at, folder, overdue=overdue, expired=expired)


_ALL = (_delta(0), _delta(1), _delta(2))


_FAR = tuple(_delta(rank, base=_OTHER) for rank in (1, 2))
_JOIN = Hint(3, 5, 1, "join")
_LEFT = [Hint(3, rank, 1, "leave") for rank in (1, 2)]
_PAIR = {"members": {0: 1, 1: 1}}
LOOKS = {
    "all have contributed": (_ALL, {}, Create(_ALL)),
    "who is expected is waited for": (_ALL[:2], {}, KeepWaiting()),
    "until a grace has passed": (_ALL[:2], {"overdue": True}, Create(_ALL[:2])),
    "who has announced itself": ((*_ALL, _JOIN), {}, KeepWaiting()),
    "and left": ((*_ALL, _JOIN, Hint(3, 5, 1, "leave")), {}, Create(_ALL)),
    "who did not do its part": (_ALL[:2], {"absent": {2}}, Create(_ALL[:2])),
    "below the quorum": (_ALL[:1], {"overdue": True}, KeepWaiting()),
    "for too long": (_ALL[:1], {"overdue": True, "expired": True}, Expired()),
    "one rank twice": ((_ALL[0], _delta(0, epoch=2, start=5)), {"overdue": True}, KeepWaiting()),
    "without its own": (_ALL[1:], {"overdue": True}, KeepWaiting()),
    "at the last moment": (_ALL, {"expired": True, "overdue": True}, Create(_ALL)),
    "one has left": ((_ALL[0], _LEFT[0]), {"may_leave": True}, KeepWaiting()),
    "all others have left": ((_ALL[0], *_LEFT), {"may_leave": True}, Leave(just_looked=False)),
    "in a sync that is not the last": ((_ALL[0], *_LEFT), {}, KeepWaiting()),
    "enough have stayed": ((*_ALL[:2], _LEFT[1]), {"may_leave": True}, Create(_ALL[:2])),
    "more of another state": ((_ALL[0], *_FAR), {}, Differ(_OTHER)),
    "fewer of another state": ((*_ALL[:2], _FAR[1]), {}, Create(_ALL[:2])),
    "as many of another state": ((_ALL[0], _FAR[0]), _PAIR, Differ(_OTHER)),
    "once more": ((_ALL[0], _FAR[0]), {**_PAIR, "differed": True}, KeepWaiting()),
    "once more, and enough": (
        (_ALL[0], _FAR[0]),
        {**_PAIR, "differed": True, "min_replicas": 1},
        Create(_ALL[:1]),
    ),
    "before all are there": ((_ALL[0], *_FAR, _JOIN), {}, KeepWaiting()),
    "though not all are there": ((_ALL[0], *_FAR, _JOIN), {"overdue": True}, Differ(_OTHER)),
    "a later incarnation with another": (
        (_ALL[0], *_FAR, _delta(1, 2, base="2" * 16)),
        {"members": {0: 1}},
        Differ("2" * 16),
    ),
    "a later incarnation with the same": (
        (_ALL[0], *_FAR, _delta(1, 2)),
        {"members": {0: 1}},
        Create((_ALL[0], _delta(1, 2))),
    ),
}


@pytest.mark.parametrize(("seen", "changes", "decided"), LOOKS.values(), ids=LOOKS)
def test_what_is_decided_by_what_is_seen(seen, changes, decided):
    assert _look(*seen, **changes) == decided


@pytest.mark.parametrize(
    ("may_leave", "then"), [(False, Expired()), (True, Leave(just_looked=True))]
)
def test_without_a_listing_only_the_time_counts(may_leave, then):
    at = replace(_ROUND, may_leave=may_leave)
    assert on_look(at, None, overdue=True, expired=False) == KeepWaiting()
    assert on_look(at, None, overdue=True, expired=True) == then


def _commit(*members, base=_BASE, previous="a" * 16):
    return Commit(3, 0, base, previous, members, {m.rank: m.stop for m in members}, 3, run="b" * 16)


@pytest.mark.parametrize(
    ("record", "follows", "decided"),
    [
        (_commit(*_ALL[1:]), True, Obey()),
        (_commit(*_ALL, base=_OTHER), True, Differ(_OTHER)),
        (_commit(*_ALL, base=_OTHER, previous="c" * 16), False, NotNext()),
        (_commit(*_ALL), False, NotNext()),
    ],
    ids=["whoever is in it", "of another state", "of another log", "not the next"],
)
def test_what_becomes_of_a_record(record, follows, decided):
    assert on_record(_ROUND, record, follows=follows) == decided


@pytest.mark.parametrize(
    ("members", "delta", "late", "becomes"),
    [
        (_ALL, _delta(0), "carry", "counted"),
        (_ALL, _delta(0, epoch=2), "carry", "dropped"),
        (_ALL, None, "carry", "dropped"),
        (_ALL[1:], _delta(0), "carry", "carried"),
        (_ALL[1:], _delta(0), "drop", "dropped"),
        (_ALL[1:], None, "carry", "carried"),
    ],
)
def test_what_becomes_of_what_was_learned(members, delta, late, becomes):
    assert fate(_commit(*members), 0, delta, learned=True, late=late) == becomes
    assert fate(_commit(*members), 0, delta, learned=False, late=late) == "none"


def test_what_an_incarnation_decides_in_the_last_moment_it_obeys():
    """Rank 1 contributes late and dies at once; rank 0 sees that just when its own time is up."""

    def train(node):
        put = node.connection.put

        def dying(key, parts):
            size = put(key, parts)
            if node.rank == 1 and Delta.parse(key) is not None:
                node.connection._kill()
            return size

        node.connection.put = dying
        return training(node)

    training = SimulatedTraining(syncs=1, sizes=(40,), sync_every=1, pauses={(1, 0): 30.0})
    schedule, settings = Schedule(2, latency=0.001), Elastic(2, grace=5.0, topology="gather")
    outcome = once(train, schedule, settings, sync_timeout=33.0, limit=500.0)
    assert outcome.results[0, 1] == 1
    assert max(report.wait_seconds for report in training.reports[0, 1]) >= 33.0
