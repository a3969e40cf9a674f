"""What an incarnation decides when it has looked at the contributions to a sync, and when it has
read the record.
"""

from dataclasses import replace

import pytest
from simulated import Schedule, SimulatedTraining, simulate

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


class TestLook:
    def test_when_all_have_contributed_it_decides(self):
        assert _look(*_ALL) == Create(_ALL)

    def test_who_is_expected_is_waited_for_until_a_grace_has_passed(self):
        assert _look(*_ALL[:2]) == KeepWaiting()
        assert _look(*_ALL[:2], overdue=True) == Create(_ALL[:2])

    def test_who_has_announced_itself_is_expected(self):
        join = Hint(3, 5, 1, "join")
        assert _look(*_ALL, join) == KeepWaiting()
        assert _look(*_ALL, join, Hint(3, 5, 1, "leave")) == Create(_ALL)

    def test_who_did_not_do_its_part_is_not_waited_for(self):
        assert _look(*_ALL[:2], absent={2}) == Create(_ALL[:2])

    def test_nothing_is_decided_below_the_quorum(self):
        assert _look(_ALL[0], overdue=True) == KeepWaiting()
        assert _look(_ALL[0], overdue=True, expired=True) == Expired()
        assert _look(_ALL[0], _delta(0, epoch=2, start=5), overdue=True) == KeepWaiting()

    def test_whose_rank_has_not_contributed_does_not_decide(self):
        assert _look(*_ALL[1:], overdue=True) == KeepWaiting()

    def test_what_can_be_decided_is_decided_at_the_last_moment_too(self):
        assert _look(*_ALL, expired=True, overdue=True) == Create(_ALL)

    @pytest.mark.parametrize(
        ("may_leave", "then"), [(False, Expired()), (True, Leave(just_looked=True))]
    )
    def test_without_a_listing_only_the_time_counts(self, may_leave, then):
        at = replace(_ROUND, may_leave=may_leave)
        assert on_look(at, None, overdue=True, expired=False) == KeepWaiting()
        assert on_look(at, None, overdue=True, expired=True) == then

    def test_a_last_sync_is_left_when_nobody_is_left_to_wait_for(self):
        left = [Hint(3, rank, 1, "leave") for rank in (1, 2)]
        assert _look(_ALL[0], *left[:1], may_leave=True) == KeepWaiting()
        assert _look(_ALL[0], *left, may_leave=True) == Leave(just_looked=False)
        assert _look(_ALL[0], *left) == KeepWaiting()
        assert _look(_ALL[0], _ALL[1], left[1], may_leave=True) == Create(_ALL[:2])


class TestStatesThatDiffer:
    def test_the_others_are_more(self):
        assert _look(_delta(0), *(_delta(rank, base=_OTHER) for rank in (1, 2))) == Differ(_OTHER)

    def test_the_others_are_fewer_and_are_not_waited_for(self):
        assert _look(_delta(0), _delta(1), _delta(2, base=_OTHER)) == Create(_ALL[:2])

    def test_without_a_majority_everybody_starts_again_once(self):
        seen = _delta(0), _delta(1, base=_OTHER)
        assert _look(*seen, members={0: 1, 1: 1}) == Differ(_OTHER)
        assert _look(*seen, members={0: 1, 1: 1}, differed=True) == KeepWaiting()
        assert _look(*seen, members={0: 1, 1: 1}, differed=True, min_replicas=1) == Create(_ALL[:1])

    def test_it_is_not_asked_before_all_are_there(self):
        others = [_delta(rank, base=_OTHER) for rank in (1, 2)]
        joins = Hint(3, 5, 1, "join")
        assert _look(_delta(0), *others, joins) == KeepWaiting()
        assert _look(_delta(0), *others, joins, overdue=True) == Differ(_OTHER)

    def test_a_later_incarnation_of_a_rank_speaks_for_it(self):
        seen = [_delta(0), _delta(1, 1, base=_OTHER), _delta(2, base=_OTHER)]
        assert _look(*seen, _delta(1, 2, base="2" * 16), members={0: 1}) == Differ("2" * 16)
        assert _look(*seen, _delta(1, 2), members={0: 1}) == Create((*_ALL[:1], _delta(1, 2)))


def _commit(*members, base=_BASE, previous="a" * 16):
    return Commit(3, 0, base, previous, members, {m.rank: m.stop for m in members}, 3, run="b" * 16)


class TestRecord:
    def test_it_is_obeyed_whoever_is_in_it(self):
        assert on_record(_ROUND, _commit(*_ALL[1:]), follows=True) == Obey()

    def test_of_another_state(self):
        assert on_record(_ROUND, _commit(*_ALL, base=_OTHER), follows=True) == Differ(_OTHER)

    def test_of_another_log(self):
        assert (
            on_record(_ROUND, _commit(*_ALL, base=_OTHER, previous="c" * 16), follows=False)
            == NotNext()
        )
        assert on_record(_ROUND, _commit(*_ALL), follows=False) == NotNext()


@pytest.mark.parametrize(
    ("members", "own", "late", "becomes"),
    [
        (_ALL, _delta(0), "carry", "counted"),
        (_ALL, _delta(0, epoch=2), "carry", "dropped"),
        (_ALL, None, "carry", "dropped"),
        (_ALL[1:], _delta(0), "carry", "carried"),
        (_ALL[1:], _delta(0), "drop", "dropped"),
        (_ALL[1:], None, "carry", "carried"),
    ],
)
def test_what_becomes_of_what_was_learned(members, own, late, becomes):
    assert fate(_commit(*members), 0, own, learned=True, late=late) == becomes
    assert fate(_commit(*members), 0, own, learned=False, late=late) == "none"


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
    outcome = simulate(
        train,
        Schedule(2, latency=0.001),
        Elastic(2, grace=5.0, topology="gather"),
        sync_timeout=33.0,
        limit=500.0,
        most_incarnations=1,
    )
    assert outcome.results[0, 1] == 1
    assert max(report.wait_seconds for report in training.reports[0, 1]) >= 33.0
