"""The rules of elastic membership, one by one."""

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_core._run._records._keys import Delta, Hint, Wish, done_key, shard_key
from diloco_core._run._records._records import Rollback
from diloco_core._run._records._rules import (
    collectable,
    done_states,
    expected,
    former_farewells,
    in_force,
    is_whole,
    kept_from,
    made_of,
    newest_done,
    rate_of,
    states_kept_from,
    writer,
)
from diloco_core._run._round._membership import Folder, Round

_BASE, _SCHEMA, _NONCE = "0" * 16, "f" * 16, "a" * 16


def _delta(rank, epoch=1, start=0, stop=5, sync=3, base=_BASE, schema=_SCHEMA):
    return Delta(sync, rank, epoch, start, stop, base, schema)


def _wish(number, rank, *values, sync=3, epoch=1, schema=_SCHEMA):
    digits = "".join(struct.pack(">d", value).hex() for value in values or (0.5,))
    key = f"deltas/{sync:08}/lr.{number}.{rank:05}.{epoch:04}.{digits}.{schema}"
    wish = Wish.parse(key)
    assert wish.key == key
    return wish


def _round(rank=0, positions=None, quorum=1):
    return Round(3, rank, _BASE, _SCHEMA, positions or {}, lambda *_: 100, "", {}, quorum)


COUNTING = {
    "the highest epoch": ([_delta(1, 2), _delta(1, 10), _delta(1, 9)], {}, [_delta(1, 10)]),
    "of another state": ([_delta(0, base="1" * 16)], {}, []),
    "of another model": ([_delta(0, schema="1" * 16)], {}, []),
    "steps that are counted already": ([_delta(0, start=4, stop=9)], {}, []),
    "steps that follow": ([_delta(0, start=5, stop=9)], {}, [_delta(0, start=5, stop=9)]),
    "no steps": ([_delta(2, start=5, stop=5)], {}, []),
    "truncated": ([_delta(2)], {_delta(2): 50}, []),
    "the whole one of two": ([_delta(2, 1), _delta(2, 2)], {_delta(2, 2): 0}, [_delta(2, 1)]),
}


@pytest.mark.parametrize(("deltas", "sizes", "counts"), COUNTING.values(), ids=COUNTING)
def test_which_contributions_count(deltas, sizes, counts):
    """Five steps of rank 0 are counted already."""
    listing = {delta.key: sizes.get(delta, 100) for delta in deltas}
    listing |= {"deltas/00000003/notes.txt": 100, Hint(3, 1, 1, "join").key: 100}
    chosen = _round(positions={0: 5}).valid(listing)
    assert list(chosen.items()) == [(delta.rank, delta) for delta in counts]


JOIN, LEAVE = Hint(3, 5, 1, "join").key, Hint(3, 0, 1, "leave").key


WAITED_FOR = {
    "members of the last commit": ({0: 1, 2: 4}, [], {0, 2}),
    "joiners, and no leavers": ({0: 1, 2: 4}, [JOIN, LEAVE], {2, 5}),
    "a successor": ({0: 2}, [LEAVE], {0}),
    "a successor that has just joined": ({0: 1}, [LEAVE, Hint(3, 0, 2, "join").key], {0}),
    "before the first sync everybody may leave": ({0: 0, 5: 0}, [LEAVE], {5}),
}


@pytest.mark.parametrize(("members", "hints", "wanted"), WAITED_FOR.values(), ids=WAITED_FOR)
def test_who_is_waited_for(members, hints, wanted):
    assert expected(members, hints) == wanted


def test_who_left_before_the_run_was_resumed_is_waited_for():
    before = [Hint(5, rank, 1, "leave").key for rank in (0, 1, 2)]
    begins = [*before, Hint(5, 1, 2, "join").key, Hint(5, 1, 2, "leave").key]
    former = former_farewells(before, 0, 2)
    assert former == set(before)
    members = {0: 1, 1: 1, 2: 1}
    assert expected(members, begins) == set()
    assert expected(members, [*before, Hint(5, 0, 2, "join").key], (), former) == {0, 1, 2}
    assert expected(members, begins, (), former) == {0, 2}, "who left again has left"


@pytest.mark.parametrize(
    "hint", [Hint(5, 1, 1, "leave"), Hint(5, 0, 2, "leave"), Hint(5, 0, 1, "join")]
)
def test_who_left_a_run_that_goes_on_is_not_waited_for(hint):
    """No earlier incarnation of rank 0, which is in its second one, has left here."""
    assert former_farewells([Hint(5, 2, 1, "leave").key, hint.key], 0, 2) == set()


@pytest.mark.parametrize(
    ("rank", "waited_for", "quorum", "overdue", "may"),
    [
        (0, {0, 1}, 2, False, True),
        (0, {0, 1, 2}, 2, False, False),
        (0, {0, 1, 2}, 2, True, True),
        (0, {0, 1}, 3, True, False),
        (2, {0, 1}, 2, True, False),
        (1, set(), 1, False, True),
    ],
)
def test_quorum_own_contribution_and_nobody_waited_for(rank, waited_for, quorum, overdue, may):
    chosen = {0: _delta(0), 1: _delta(1)}
    folder = Folder(chosen, {}, tuple(waited_for - chosen.keys()))
    assert _round(rank, quorum=quorum).may_commit(folder, overdue=overdue) is may


def _collect(keys, last, kept, retention=2, **options):
    options = {"keep_deltas": False, **options}
    return collectable(keys, last=last, kept=kept, retention=retention, initial=_NONCE, **options)


@given(st.integers(1, 9), st.integers(0, 99), st.integers(1, 10**7))
def test_contributions_and_shards_have_one_writer(world_size, number, sync):
    """Each rank of a fixed run updates every ``world_size``-th shard, and what is not a rank's own
    has no writer.
    """
    rank = number % world_size
    assert writer(_delta(rank, sync=sync).key, world_size) == rank
    assert writer(shard_key(sync, 0, number, _NONCE), world_size) == rank
    others = [done_key(sync, 0), Hint(sync, rank, 1, "left").key, shard_key(0, 0, number, _NONCE)]
    assert [writer(key, world_size) for key in others] == [None] * 3


def _states(*syncs):
    return [shard_key(sync, 0, 0, _NONCE) for sync in syncs]


def _deltas(*syncs):
    return [_delta(0, sync=sync).key for sync in syncs]


def _initial(nonce, *numbers):
    return [f"initial/{nonce}/{number:03}.00000.safetensors" for number in numbers]


FIRST = [*_initial(_NONCE, 0, 1), *_initial(_SCHEMA, 1)]
RECORDS = ["commits/00000001.json", "claims/00000/0001.json", "manifest.json"]
COLLECTED = {
    "contributions with their state": (_deltas(1, 2, 3), 3, [2], _deltas(1, 2)),
    "wishes beside them": ([_wish(1, 0, sync=1).key], 2, [1], [_wish(1, 0, sync=1).key]),
    "each fragment for itself": (_deltas(1, 2, 3, 4), 4, [3, 2], _deltas(1, 2, 3)),
    "in any order": (_deltas(1, 2, 3, 4), 4, [1, 4], _deltas(1, 2, 4)),
    "states with a newer one": (_states(1, 2, 3, 4), 4, [4], _states(1, 2)),
    "that nobody may lag": (_states(1, 2, 3, 4), 4, [2], _states(1)),
    "not the newest state": ([*_states(3), done_key(3, 0)], 99, [3], []),
    "the initial state and leftovers": (FIRST, 5, [5, 0], [FIRST[0], FIRST[2]]),
    "not before": (FIRST, 1, [1, 0], []),
    "no records": (RECORDS, 99, [99], []),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "last", "kept", "gone"), COLLECTED.values(), ids=COLLECTED)
def test_what_is_collected(keys, last, kept, gone):
    assert _collect(keys, last, kept) == gone


def test_gather_keeps_contributions_for_those_who_lag():
    assert _collect(_deltas(1, 2, 3), last=4, kept=[4], keep_deltas=True) == _deltas(1, 2)


@given(st.sets(st.integers(1, 30)), st.integers(1, 30), st.integers(0, 30), st.integers(1, 4))
def test_conditions_only_become_truer(syncs, last, done, retention):
    keys = [*_deltas(*syncs), *_states(*syncs)]
    now = set(_collect(keys, last, [min(done, last)], retention))
    assert now <= set(_collect(keys, last + 1, [min(done, last) + 1], retention))


def test_newest_done_is_per_fragment():
    keys = [done_key(1, 0), done_key(3, 0), done_key(2, 1), *_states(5)]
    assert newest_done(keys, 2) == [3, 2]
    assert newest_done([], 2) == [0, 0]


@given(
    st.builds(
        _delta,
        st.integers(0, 99999),
        st.integers(1, 10**6),
        st.integers(0, 10**9),
        st.integers(0, 10**9),
    ),
    st.integers(0, 10**18 - 1),
)
def test_keys_of_contributions_say_everything(delta, tokens):
    delta = replace(delta, tokens=tokens)
    assert Delta.parse(delta.key) == delta


@given(
    st.integers(1, 10**9 - 1),
    st.integers(0, 99999),
    st.floats(5e-324, 1.7e308),
    st.integers(1, 99_999_999),
    st.integers(1, 10**6),
)
def test_keys_of_wishes_say_everything(number, rank, value, sync, epoch):
    wish = _wish(number, rank, value, sync=sync, epoch=epoch)
    assert (wish.sync, wish.rate.rank, wish.rate.epoch, wish.schema) == (sync, rank, epoch, _SCHEMA)
    assert (wish.rate.number, wish.rate.values) == (number, (value,))


HALF = "3fe0000000000000"


@pytest.mark.parametrize(
    ("old", "new"),
    [(HALF, wrong) for wrong in ("0" * 16, "7ff0000000000000", "bfe0000000000000", HALF[:-1])]
    + [("lr.1.", wrong) for wrong in ("lr.0.", "lr.01.", "lr.1111111111.")]
    + [(_SCHEMA, "f")],
)
def test_keys_that_are_no_wishes_are_passed_over(old, new):
    key = _wish(1, 0).key
    assert old in key
    assert Wish.parse(key.replace(old, new)) is None


LAST = _wish(2, 5, 0.7).rate


HEARD = {
    "none": ([], None),
    "one": ([_wish(3, 0)], 0),
    "the greater rank": ([_wish(3, 0), _wish(3, 1, 0.2)], 1),
    "in any order": ([_wish(3, 1, 0.2), _wish(3, 0)], 0),
    "the greater number": ([_wish(4, 0), _wish(3, 1, 0.2)], 0),
    "the later incarnation": ([_wish(3, 1), _wish(3, 1, 0.2, epoch=2)], 1),
    "two of one incarnation": ([_wish(3, 1, 0.2), _wish(3, 1, 0.1)], 1),
    "heard before": ([_wish(2, 7), _wish(1, 9, 0.2)], None),
    "of another run": ([_wish(3, 1, schema="e" * 16)], None),
    "for another number of groups": ([_wish(3, 1, 0.1, 0.2)], None),
}


@pytest.mark.parametrize(("wishes", "heard"), HEARD.values(), ids=HEARD)
def test_the_rate_that_a_record_takes(wishes, heard):
    listing = [_delta(0).key, *(wish.key for wish in wishes), "deltas/00000003/lr.x"]
    assert rate_of(LAST, listing, _SCHEMA) == (LAST if heard is None else wishes[heard].rate)


def test_the_two_newest_states_of_a_fragment_are_kept():
    keys = [done_key(sync, 0) for sync in (1, 3, 5)] + [done_key(sync, 1) for sync in (2, 4)]
    assert kept_from(keys, 2, last=5) == [3, 2]
    assert kept_from(keys[2:4], 2, last=5) == [0, 0], "one complete state and the initial one"


def test_a_sleeper_keeps_what_a_rollback_went_back_to():
    """States 1 and 3 were complete; rollback 6 gave up state 5, and it knows nothing of that."""
    keys = [done_key(sync, 0) for sync in (1, 3, 7)]
    assert kept_from(keys, 2, last=5) == [1, 0]


def test_after_a_rollback_only_states_after_it_count():
    rollback = Rollback(6, (1, 4), (3, 5), {0: 1}, run="f" * 16)
    keys = [done_key(sync, 0) for sync in (1, 3, 5)] + [done_key(sync, 1) for sync in (2, 4)]
    assert done_states(keys, 2, [rollback]) == [{1}, {4, 2}]
    again = Rollback(9, (7, 2), (8,), {0: 1}, run="f" * 16)
    assert done_states([*keys, done_key(7, 0)], 2, [rollback, again]) == [{1, 7}, {2}]
    assert kept_from([*keys, done_key(7, 0)], 2, last=9, rollback=6) == [0, 0]
    assert kept_from([*keys, done_key(7, 0), done_key(9, 0)], 2, last=9, rollback=6) == [7, 0]


@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.sets(st.integers(1, 40), max_size=3),
    st.integers(1, 40),
    st.data(),
)
def test_what_an_encoded_state_is_made_of(count, every, at, last, data):
    """The newest whole state of the fragment that counts, and all of its syncs since that count,
    whatever was given up.
    """
    rollbacks = []

    def counting(index, end):
        syncs = range(index + 1, end, count)
        return [0, *(sync for sync in syncs if in_force(sync, index, rollbacks))]

    for number in sorted(at):
        states = tuple(data.draw(st.sampled_from(counting(i, number)[-3:])) for i in range(count))
        given_up = tuple(s for s in range(1, number) if s > states[(s - 1) % count])
        rollbacks.append(Rollback(number, states, given_up, {}, run="f" * 16))
    for index in range(count):
        syncs = counting(index, last + 1)
        for place, sync in enumerate(syncs):
            made = made_of(sync, index, count, every, rollbacks)
            assert made == syncs[place + 1 - len(made) : place + 1]
            whole = [is_whole(each, count, every) for each in made]
            assert whole == [True] + [False] * (len(made) - 1)


def test_what_a_given_up_state_is_made_of_can_be_named():
    rollback = Rollback(5, (2,), (3, 4), {}, run="f" * 16)
    assert made_of(3, 0, 1, 2, [rollback]) == [2, 3]
    assert made_of(7, 0, 1, 2, [rollback]) == [6, 7]


def test_every_state_is_whole_unless_it_is_encoded():
    assert [made_of(sync, 0, 2, 1) for sync in (0, 1, 7)] == [[0], [1], [7]]
    assert [sync for sync in range(13) if is_whole(sync, 2, 3)] == [0, 5, 6, 11, 12]


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), st.integers(0, 40), st.data())
def test_what_is_deleted_of_encoded_states_is_needed_by_nobody(count, every, retention, last, data):
    """The two newest complete states can be made, and whoever lags no more than allowed finds what
    comes next.
    """
    syncs = range(1, last + 1)
    complete = data.draw(st.sets(st.sampled_from(syncs))) if last else set()
    keys = [shard_key(s, (s - 1) % count, 0, _NONCE) for s in syncs]
    keys += [done_key(s, (s - 1) % count) for s in complete]
    keys += [shard_key(0, index, 0, _NONCE) for index in range(count)]
    kept = kept_from(keys, count, last=last)
    states_kept = states_kept_from(keys, count, kept, every=every)
    gone = set(_collect(keys, last, kept, retention, states_kept=states_kept))
    for index in range(count):
        newest = sorted({0, *(s for s in complete if (s - 1) % count == index)}, reverse=True)[:2]
        needed = {part for sync in newest for part in made_of(sync, index, count, every)}
        needed |= {s for s in syncs if (s - 1) % count == index and s > last - retention}
        assert not gone & {shard_key(sync, index, 0, _NONCE) for sync in needed}
    # Nothing is kept for ever.
    oldest = min(states_kept, default=0)
    assert all(
        int(key.split("/")[1]) > min(oldest - 1, last - retention)
        for key in {*keys} - gone
        if key.startswith("state/")
    )
