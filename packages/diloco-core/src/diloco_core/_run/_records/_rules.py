"""The rules of elastic membership, as functions of what was listed.

They say which ranks are waited for, which states are complete, and what may be deleted. With
:class:`.._round._membership.Round`, which says which contributions count, they are exactly the
rules of the model-checked protocol. Nothing here reads a store or a clock.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from ..._arithmetic._rate import Rate, chosen
from ._keys import Delta, Hint, Wish, farewells
from ._records import Rollback

_STATE = re.compile(r"state/(\d{8})/(\d{3})\.(?:(\d{5})\.safetensors|done\.json)", re.ASCII)
_DONE = re.compile(r"state/(\d{8})/(\d{3})\.done\.json", re.ASCII)
# The rank of a contribution or the number of a shard.
_WRITTEN = re.compile(r"deltas/\d{8}/(\d{5})\.|state/\d{8}/\d{3}\.(\d{5})\.", re.ASCII)
_INITIAL = re.compile(r"initial/([0-9a-f]{16})/(\d{3})\.\d{5}\.safetensors", re.ASCII)


def expected(
    members: Mapping[int, int],
    listing: Iterable[str],
    absent: Collection[int] = (),
    former: Collection[str] = (),
) -> set[int]:
    """Return the ranks to wait for.

    They are those of the last commit and those that announced themselves, without those that leave.

    Args:
        members: The members of the last commit, as epoch by rank.
        listing: Keys under the sync's folder.
        absent: Members that did not do their part after the last commit.
        former: Keys of the listing that do not count; see :func:`former_farewells`.
    """
    alive = {rank: epoch for rank, epoch in members.items() if rank not in absent}
    left: dict[int, int] = {}
    for hint in filter(None, map(Hint.parse, (key for key in listing if key not in former))):
        if hint.event not in {"join", "leave"}:
            continue
        epoch_by_rank = alive if hint.event == "join" else left
        epoch_by_rank[hint.rank] = max(epoch_by_rank.get(hint.rank, 0), hint.epoch)
    return {rank for rank, epoch in alive.items() if left.get(rank, -1) < epoch}


def former_farewells(listing: Iterable[str], rank: int, epoch: int) -> set[str]:
    """Return the ``leave`` hints that a new incarnation finds where a stopped run is resumed.

    They are of incarnations that left in the same sync as an earlier one of this rank. Like this
    rank, they may be back in a moment. So the new incarnation waits for them, which costs at most a
    grace and decides nothing. Empty if no earlier incarnation of this rank has left there.
    """
    hints = farewells(listing)
    own_rank_left = any(hint.rank == rank and hint.epoch < epoch for hint in hints)
    return {hint.key for hint in hints} if own_rank_left else set()


def rate_of(standing: Rate, listing: Iterable[str], schema: str) -> Rate:
    """The learning rate of the outer step that a record decides.

    Args:
        standing: The rate of the outer step before; before any wish, what the incarnation proposes.
        listing: Keys under the sync's folder. A wish stands there before the contribution of its
            incarnation does, so one listing that shows a contribution shows its wish, too.
        schema: Identifies the run and the fragment in the keys of wishes.
    """
    wishes = (
        wish.rate
        for wish in map(Wish.parse, listing)
        if wish is not None
        and wish.schema == schema
        and wish.rate.number > standing.number
        and len(wish.rate.values) == len(standing.values)
    )
    # Two wishes of one incarnation differ only in values. Any order will do: the record decides.
    return chosen([standing, *sorted(wishes, key=lambda rate: rate.values)])


def done_states(
    listing: Iterable[str], fragments: int, rollbacks: Collection[Rollback] = ()
) -> list[set[int]]:
    """For every fragment, the syncs after which its state is complete, without the initial state.

    Args:
        listing: Keys under ``state/``.
        fragments: How many fragments there are.
        rollbacks: Rollbacks; states that they gave up are left out.
    """
    complete: list[set[int]] = [set() for _ in range(fragments)]
    for match in filter(None, map(_DONE.fullmatch, listing)):
        sync, fragment = map(int, match.groups())
        if fragment < fragments and in_force(sync, fragment, rollbacks):
            complete[fragment].add(sync)
    return complete


def in_force(sync: int, fragment: int, rollbacks: Iterable[Rollback]) -> bool:
    """Say whether a sync of a fragment still counts, because no later rollback has given it up."""
    return all(sync > rollback.sync or sync <= rollback.states[fragment] for rollback in rollbacks)


def states(listing: Iterable[str]) -> list[tuple[int, int]]:
    """The syncs and fragments of which the listing has a part of a published state."""
    matches = filter(None, map(_STATE.fullmatch, listing))
    return [(int(match[1]), int(match[2])) for match in matches]


def is_state(key: str) -> bool:
    """Say whether a key is that of a part of a published state or of the initial state."""
    return _STATE.fullmatch(key) is not None or _INITIAL.fullmatch(key) is not None


def is_whole(sync: int, fragments: int, every: int) -> bool:
    """Say whether the published state after a sync holds all values of its fragment.

    Otherwise it holds only how the sync has changed them.

    Args:
        sync: The sync; 0 for the initial state.
        fragments: How many fragments are synced in turn.
        every: Every so many syncs of a fragment its values are published whole; 1 unless the state
            is published encoded.
    """
    return ((sync - 1) // fragments + 1) % every == 0


def made_of(
    sync: int, index: int, fragments: int, every: int, rollbacks: Collection[Rollback] = ()
) -> list[int]:
    """Return the syncs whose published objects make a fragment's state, in order.

    They are the newest whole one and the changes since. An incarnation can start only from a whole
    state, and has to add every change after it that still counts.

    Args:
        sync: The sync after which the fragment has that state, which counts; 0 for the initial one.
        index: Index of the fragment.
        fragments: How many fragments are synced in turn.
        every: As for :func:`is_whole`.
        rollbacks: The rollbacks that are known.
    """
    needed: list[int] = []
    for number in chain(range(sync, 0, -fragments), [0]):
        if number in {sync, 0} or in_force(number, index, rollbacks):
            needed.append(number)
            if is_whole(number, fragments, every):
                break
    return needed[::-1]


def newest_done(
    listing: Iterable[str], fragments: int, every: int = 1, rollbacks: Collection[Rollback] = ()
) -> list[int]:
    """Return for every fragment the newest sync whose state is complete.

    It is 0 for the initial state. With ``every``, as for :func:`is_whole`, only whole states count.
    """
    return [
        max((sync for sync in states if is_whole(sync, fragments, every)), default=0)
        for states in done_states(listing, fragments, rollbacks)
    ]


def states_kept_from(
    listing: Iterable[str], fragments: int, kept: Sequence[int], *, every: int, rollback: int = 0
) -> list[int]:
    """Return for every fragment the newest complete and whole state up to the one that must stay.

    What must stay is made of it and the changes since. It is 0 if none follows the newest rollback.

    Args:
        listing: Keys under ``state/``.
        fragments: How many fragments there are.
        kept: What :func:`kept_from` returned.
        every: As for :func:`is_whole`.
        rollback: Number of the newest rollback.
    """
    kept_states = []
    for states, newest in zip(done_states(listing, fragments), kept, strict=True):
        whole = (sync for sync in states if is_whole(sync, fragments, every))
        kept_states.append(max((sync for sync in whole if rollback < sync <= newest), default=0))
    return kept_states


def kept_from(
    listing: Iterable[str], fragments: int, *, last: int, rollback: int = 0, count: int = 2
) -> list[int]:
    """Return for every fragment the sync of the older of its two newest complete states.

    The newest could be made again from it. It is 0 if there are fewer than two such states, or
    fewer than ``count``, of which it is then the oldest. Only states after the newest rollback
    count, so that nothing that the run went back to is considered unneeded. States after ``last``,
    up to which the log is known, do not count either: there may be a rollback before them that went
    back further.
    """
    oldest = []
    for states in done_states(listing, fragments):
        newest = sorted((sync for sync in states if rollback < sync <= last), reverse=True)[:count]
        oldest.append(newest[-1] if len(newest) == count else 0)
    return oldest


def collectable(
    keys: Iterable[str],
    *,
    last: int,
    kept: Sequence[int],
    retention: int,
    keep_deltas: bool,
    initial: str,
    states_kept: Sequence[int] | None = None,
) -> list[str]:
    """The keys that no incarnation can need any more.

    What is not needed now will never be needed again, so deleting late is safe.

    Only keys that the run itself has written are returned: keys of other shapes belong to something
    else, and stay.

    Args:
        keys: Keys under ``deltas/``, ``state/`` and ``initial/``.
        last: The last commit known.
        kept: For every fragment, the sync whose state must stay, with all that came after it.
        retention: How many syncs an incarnation may lag behind without reloading.
        keep_deltas: Whether an incarnation that lags behind needs contributions too (gather), and
            not just published shards.
        initial: Nonce of the initial state.
        states_kept: For every fragment, the first of the syncs whose objects that state is made of;
            see :func:`states_kept_from`. Left out, every state is whole.
    """
    states_kept = kept if states_kept is None else states_kept
    unneeded = []
    for key in keys:
        payload = Delta.parse(key) or Hint.parse(key) or Wish.parse(key)
        state, initial_shard = _STATE.fullmatch(key), _INITIAL.fullmatch(key)
        if payload is not None:
            sync = payload.sync
            is_old = 0 < sync <= min(last, kept[(sync - 1) % len(kept)])
            if is_old and (not keep_deltas or sync <= last - retention):
                unneeded.append(key)
        elif state:
            sync, fragment = int(state[1]), int(state[2])
            oldest = states_kept[fragment] if fragment < len(states_kept) else 0
            if sync < min(oldest, last - retention + 1):
                unneeded.append(key)
        elif initial_shard and last >= retention:
            fragment = int(initial_shard[2])
            oldest = states_kept[fragment] if fragment < len(states_kept) else 0
            if initial_shard[1] != initial or oldest > 0:
                unneeded.append(key)
    return unneeded


def writer(key: str, world_size: int) -> int | None:
    """The rank of a fixed run that writes a contribution or a shard; None for all other keys."""
    match = _WRITTEN.match(key)
    if match is None:
        return None
    return int(match[1]) if match[1] else int(match[2]) % world_size
