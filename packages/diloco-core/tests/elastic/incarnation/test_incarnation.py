"""What an incarnation knows is written by whom it belongs to, and by nobody else."""

from types import SimpleNamespace

import pytest

from diloco_core import CorruptedObjectError
from diloco_core._run._incarnation._incarnation import Incarnation
from diloco_core._run._incarnation._memory import Damage, Handover, Traffic
from diloco_core._run._incarnation._progress import Progress
from diloco_core._run._incarnation._standing import Standing
from diloco_core._run._records._keys import Delta, Hint
from diloco_core._run._records._records import Commit, Rollback

_RUN = "b" * 16


def _commit(sync, previous, *, rank=0, positions=None, rollback=0):
    fragment, start = (sync - 1) % 2, 2 * ((sync - 1) // 2)
    member = Delta(sync, rank, 1, start, start + 2, "0" * 16, "f" * 16)
    return Commit(
        sync,
        fragment,
        "0" * 16,
        previous,
        (member,),
        positions or {rank: start + 2},
        (sync + 1) // 2,
        rollback,
        run=_RUN,
    )


def _standing(clock=lambda: 0.0):
    job = SimpleNamespace(layout=SimpleNamespace(shards=1, groups=()))
    manifest = SimpleNamespace(world_size=3, first=0, run=lambda: _RUN)
    standing = Standing([Progress(job, 0), Progress(job, 1)], manifest, "u", clock)
    standing.begin()
    return standing


def _incarnation(standing):
    nothing = SimpleNamespace(uri="u", clock=lambda: 0.0, grace=5.0)
    return Incarnation(
        store=nothing,
        timing=nothing,
        settings=nothing,
        manifest=nothing,
        run=_RUN,
        rank=0,
        epoch=1,
        claim=b"",
        chunk_bytes=1,
        scratch=nothing,
        standing=standing,
    )


_READ_ONLY = [
    "fragments",
    "rollback",
    "run",
    "sync",
    "standing",
]


@pytest.mark.parametrize("name", [*_READ_ONLY, "traffic", "handover", "damage", "epoch"])
def test_nothing_of_an_incarnation_is_set_from_outside(name):
    incarnation = _incarnation(_standing())
    before = getattr(incarnation, name)
    # A TypeError in Python 3.11, where the class is frozen, has slots, and this is a property.
    with pytest.raises((AttributeError, TypeError)):
        setattr(incarnation, name, before)


class TestStanding:
    def test_it_moves_on_by_one_record(self):
        now = [0.0]
        standing = _standing(lambda: now[0])
        assert (standing.sync, standing.previous, dict(standing.members)) == (
            0,
            _RUN,
            {0: 0, 1: 0, 2: 0},
        )
        now[0] = 7.0
        first = _commit(1, _RUN)
        assert standing.seconds == 7.0
        assert standing.follows(first)
        standing.advance(first, "1" * 16)
        assert (standing.sync, standing.previous, dict(standing.members)) == (1, "1" * 16, {0: 1})
        assert (standing.fragments[0].sync, standing.fragments[0].commit) == (1, first)
        assert (standing.fragments[1].sync, standing.seconds) == (0, 0.0)

    @pytest.mark.parametrize(
        "wrong",
        [
            _commit(2, _RUN),
            _commit(1, "2" * 16),
            _commit(1, _RUN, positions={0: 2, 1: 5}),
            _commit(1, _RUN, rollback=1),
        ],
    )
    def test_what_is_not_the_next_record_does_not_follow(self, wrong):
        standing = _standing()
        assert not standing.follows(wrong)
        with pytest.raises(CorruptedObjectError, match="does not follow"):
            _incarnation(standing).verify(wrong)

    def test_after_a_sync_that_was_given_up_any_record_before_the_next_will_do(self):
        standing = _standing()
        standing.pass_over(1)
        assert standing.follows(_commit(2, "5" * 16))
        assert (standing.sync, standing.previous) == (1, "")

    def test_after_a_rollback_everybody_is_waited_for(self):
        standing = _standing()
        standing.advance(_commit(1, _RUN), "1" * 16)
        rollback = Rollback(2, (0, 0), (1,), {}, run=_RUN)
        assert not standing.holds(rollback)
        standing.fragments[0] = Progress(standing.fragments[0].job, 0)
        assert standing.holds(rollback)
        standing.turn_back(rollback, "2" * 16)
        assert (standing.sync, standing.rollback, standing.previous) == (2, 2, "2" * 16)
        assert set(standing.members) == {0, 1, 2}

    def test_a_state_of_another_record_is_not_skipped_to(self):
        standing = _standing()
        standing.advance(_commit(1, _RUN), "1" * 16)
        with pytest.raises(CorruptedObjectError, match="was published for another record"):
            standing.skip(_commit(1, _RUN, rank=2), "3" * 16)


def test_a_contribution_that_was_left_open_is_taken_up_by_its_own_sync_only():
    own, handover = Delta(4, 0, 1, 0, 2, "0" * 16, "f" * 16), Handover()
    for sync, taken in ((5, None), (4, own)):
        handover.open = own
        assert handover.take_open(sync) == taken
        assert handover.open is None


def test_everybody_who_asks_is_answered_once():
    first, second = Hint(3, 1, 1, "repair"), Hint(3, 2, 1, "repair")
    damage = Damage()
    assert [damage.is_asked(asked) for asked in ({first}, {first}, set(), {first, second})] == [
        True,
        False,
        False,
        True,
    ]


def test_what_was_mended_is_trusted_again():
    damage = Damage()
    damage.make_again(0, 4, "rotten")
    damage.distrust(0, 4, "a.")
    damage.distrust(1, 5, "b.")
    damage.mended(0, 4)
    assert (dict(damage.mending), damage.found(0, 4), damage.found(1, 5)) == ({}, "", "b")


def test_every_sync_counts_its_own_traffic():
    traffic = Traffic()
    traffic.count_sent(5)
    traffic.received, traffic.waited = 7, 1.5
    traffic.begin()
    assert (traffic.sent, traffic.received, traffic.waited) == (0, 0, 0.0)
