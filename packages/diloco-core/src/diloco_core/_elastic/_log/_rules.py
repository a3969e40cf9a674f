"""The rules of elastic membership, as functions of what was listed: who counts, who is waited for, what may go.

They are exactly those of the model-checked protocol; nothing here reads a store or a clock.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ._keys import Delta, Hint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from ._records import Rollback

_STATE = re.compile(r"state/(\d{8})/(\d{3})\.(?:\d{5}\.safetensors|done\.json)", re.ASCII)
_DONE = re.compile(r"state/(\d{8})/(\d{3})\.done\.json", re.ASCII)
_INITIAL = re.compile(r"initial/([0-9a-f]{16})/(\d{3})\.\d{5}\.safetensors", re.ASCII)


def valid(
    listing: Mapping[str, int],
    *,
    base: str,
    schema: str,
    positions: Mapping[int, int],
    size: Callable[[int], int | None],
) -> dict[int, Delta]:
    """At most one valid contribution per rank, that of its highest epoch, in rank order.

    Valid: made from the state that the sync starts from, of inner steps that have not been counted yet, and whole.

    Args:
        listing: Keys and sizes below the sync's folder.
        base: Digest of the fragment's state before the sync.
        schema: Name of the run and the fragment, as in the keys of their contributions.
        positions: Inner steps counted so far, by rank.
        size: How many bytes a contribution of certain groups must have; None where no contribution has these groups.
    """
    chosen: dict[int, Delta] = {}
    for key, stored_size in listing.items():
        delta = Delta.parse(key)
        if (
            delta is None
            or (delta.base, delta.schema) != (base, schema)
            or stored_size != size(delta.groups)
        ):
            continue
        if not positions.get(delta.rank, 0) <= delta.start < delta.stop:
            continue
        other = chosen.get(delta.rank)
        if other is None or other.epoch < delta.epoch:
            chosen[delta.rank] = delta
    return dict(sorted(chosen.items()))


def expected(
    members: Mapping[int, int],
    listing: Iterable[str],
    absent: Collection[int] = (),
    former: Collection[str] = (),
) -> set[int]:
    """Ranks to wait for: those of the last commit and those that announced themselves, without those that leave.

    Args:
        members: Epoch by rank of the last commit's members.
        listing: Keys below the sync's folder.
        absent: Members that did not do their part after the last commit.
        former: Keys of the listing that do not count: see :func:`former_farewells`.
    """
    alive, left = (
        {rank: epoch for rank, epoch in members.items() if rank not in absent},
        dict[int, int](),
    )
    for hint in filter(None, map(Hint.parse, (key for key in listing if key not in former))):
        if hint.event not in {"join", "leave"}:
            continue
        seen = alive if hint.event == "join" else left
        seen[hint.rank] = max(seen.get(hint.rank, 0), hint.epoch)
    return {rank for rank, epoch in alive.items() if left.get(rank, -1) < epoch}


def former_farewells(listing: Iterable[str], rank: int, epoch: int) -> set[str]:
    """Hints of lives that left before a stopped run was resumed, as a life finds them that begins there; else none.

    They have left in the same sync as an earlier life of the own rank. Like that, they may be back in a moment: they are waited
    for, which costs a grace at most, and decides nothing.
    """
    hints = {
        key: hint
        for key in listing
        if (hint := Hint.parse(key)) is not None and hint.event == "leave"
    }
    return (
        set(hints)
        if any(hint.rank == rank and hint.epoch < epoch for hint in hints.values())
        else set()
    )


def may_commit(
    chosen: Mapping[int, Delta],
    waited_for: set[int],
    *,
    rank: int,
    min_replicas: int,
    overdue: bool,
) -> bool:
    """Whether a life may create the commit record: its rank contributed, the quorum is there, nobody is waited for."""
    return (
        rank in chosen and len(chosen) >= min_replicas and (overdue or waited_for <= chosen.keys())
    )


def done_states(
    listing: Iterable[str], fragments: int, rollbacks: Collection[Rollback] = ()
) -> list[set[int]]:
    """For every fragment, the syncs after which its state is complete; without the initial state.

    Args:
        listing: Keys below ``state/``.
        fragments: How many fragments there are.
        rollbacks: What they gave up is left out.
    """
    complete: list[set[int]] = [set() for _ in range(fragments)]
    for match in filter(None, map(_DONE.fullmatch, listing)):
        sync, fragment = map(int, match.groups())
        if fragment >= fragments:
            continue
        if in_force(sync, fragment, rollbacks):
            complete[fragment].add(sync)
    return complete


def in_force(sync: int, fragment: int, rollbacks: Iterable[Rollback]) -> bool:
    """Whether a sync of a fragment still counts: no rollback after it has given it up."""
    return all(sync > rollback.sync or sync <= rollback.states[fragment] for rollback in rollbacks)


def states(listing: Iterable[str]) -> list[tuple[int, int]]:
    """Of which syncs and fragments something is published."""
    return [
        (int(match[1]), int(match[2])) for match in filter(None, map(_STATE.fullmatch, listing))
    ]


def is_state(key: str) -> bool:
    """Whether a key is that of a part of a published or initial state."""
    return _STATE.fullmatch(key) is not None or _INITIAL.fullmatch(key) is not None


def newest_done(listing: Iterable[str], fragments: int) -> list[int]:
    """For every fragment, the newest sync whose state is complete (0: the initial one)."""
    return [max(states, default=0) for states in done_states(listing, fragments)]


def kept_from(listing: Iterable[str], fragments: int, *, last: int, rollback: int = 0) -> list[int]:
    """For every fragment, the older of its two newest complete states: from it, the newest could be made again.

    Only states after the newest rollback count, so that nothing from before it is missed; 0 where there are fewer than two. Nor
    do those after ``last``, up to which the log is known: there may be a rollback between, that went back behind others.
    """
    oldest = []
    for states in done_states(listing, fragments):
        newest = sorted((sync for sync in states if rollback < sync <= last), reverse=True)[:2]
        oldest.append(newest[1] if len(newest) == 2 else 0)
    return oldest


def collectable(
    keys: Iterable[str],
    *,
    last: int,
    kept: list[int],
    retention: int,
    keep_deltas: bool,
    initial: str,
) -> list[str]:
    """Keys that no life can need any more. Conditions only ever become truer, so late deletes are safe.

    Only what the run itself has written: keys of other shapes are somebody else's, and stay.

    Args:
        keys: Keys below ``deltas/``, ``state/`` and ``initial/``.
        last: The last commit known.
        kept: For every fragment, the sync whose state must stay, with everything that was committed after it.
        retention: How many syncs a life may lag without reloading.
        keep_deltas: Whether such a life needs contributions too (gather), and not just published shards.
        initial: Nonce of the initial state.
    """
    unneeded = []
    for key in keys:
        payload = Delta.parse(key) or Hint.parse(key)
        state, first = _STATE.fullmatch(key), _INITIAL.fullmatch(key)
        if payload is not None:
            sync = payload.sync
            old = 0 < sync <= min(last, kept[(sync - 1) % len(kept)])
            if old and (not keep_deltas or sync <= last - retention):
                unneeded.append(key)
        elif state:
            sync, fragment = int(state[1]), int(state[2])
            if fragment < len(kept) and sync < kept[fragment] and sync <= last - retention:
                unneeded.append(key)
        elif first and last >= retention:
            fragment = int(first[2])
            if first[1] != initial or (fragment < len(kept) and kept[fragment] > 0):
                unneeded.append(key)
    return unneeded
