"""Who computes which shard of a committed sync, and when: what a life decides while it adopts the result.

This is step 11 of the protocol. Shard k belongs to member k mod n of the record. Who waits for it too long does the work of its
owner: the shard is created once, so two that do it at the same time do no harm, and everybody takes the bytes that are there.
Nothing here reads a store or a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_STAGGER = 0.5


@dataclass(frozen=True, slots=True)
class Shares:
    """The shards of a committed sync, as one life sees them. In the sharded topology.

    Attributes:
        sync: Number of the sync.
        members: Ranks of the record's members, in order.
        rank: Rank of the life.
        grace: Seconds that it waits for an owner.
        mending: Whether the result was published before, and some of it is damaged or gone: what is whole is taken as it is, by
            its owner too, and what is missing is for whoever comes first.
    """

    sync: int
    members: tuple[int, ...]
    rank: int
    grace: float
    mending: bool = False

    @property
    def member(self) -> int | None:
        """The life's place among the members; None where the record leaves its rank out."""
        return self.members.index(self.rank) if self.rank in self.members else None

    @property
    def designated(self) -> bool:
        """Whether the life does the chores of the sync: another member every time."""
        return self.member == self.sync % len(self.members)

    def owner(self, shard: int) -> int:
        """Which member updates a shard."""
        return shard % len(self.members)

    def own(self, shards: Iterable[int]) -> list[int]:
        """Those of the shards that the life updates without looking for them first."""
        if self.mending:
            return []
        return [shard for shard in shards if self.owner(shard) == self.member]

    def turn(self, shard: int) -> float:
        """Seconds after which the life does the work of a shard's owner: the next member first, then the one after it.

        So that one replica does it, and not all at once; a life that the record leaves out comes last.
        """
        if self.mending:
            return 0.0
        count, member = len(self.members), self.member
        distance = count if member is None else (member - self.owner(shard)) % count
        return self.grace + (distance - 1) * min(_STAGGER, self.grace / 10)

    def late_owners(self, pending: Iterable[int], elapsed: float) -> set[int]:
        """Ranks that have not published their shards in time, and are most likely gone: the next sync does not wait for them."""
        if elapsed < self.grace:
            return set()
        return {self.members[self.owner(shard)] for shard in pending} - {self.rank}

    def patience(self, shards: Iterable[int]) -> float:
        """Seconds after which nobody else will have done it either, where this life cannot compute these shards."""
        return self.grace + max(map(self.turn, shards))


@dataclass(frozen=True, slots=True)
class Pending:
    """What is still to come of a sync's result, in one pass over it.

    Attributes:
        shards: The shards that this life has not adopted.
        published: Those of them that are in the store, and were not tried yet in this pass.
        arrived: Whether this pass has brought any.
        readable: Whether this life can read what they are computed from.
    """

    shards: tuple[int, ...]
    published: tuple[int, ...] = ()
    arrived: bool = False
    readable: bool = True


@dataclass(frozen=True, slots=True)
class Adopt:
    """Take these shards as they are published.

    Attributes:
        shards: Which.
    """

    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compute:
    """Do the work of the owners of these shards, one after another.

    Attributes:
        shards: Which.
    """

    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LookAgain:
    """List what is published once more: something has come, so more may have."""


@dataclass(frozen=True, slots=True)
class KeepWaiting:
    """Nothing is to be done yet."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """What the result is computed from cannot be read here, and nobody else has computed it: end with that error."""


@dataclass(frozen=True, slots=True)
class Complete:
    """All of it is adopted."""


def on_pending(
    shares: Shares, pending: Pending, *, elapsed: float, patience: float
) -> Adopt | Compute | LookAgain | KeepWaiting | GiveUp | Complete:
    """What a life does that adopts a committed sync: first what is published, then what its owner is late with.

    Args:
        shares: Whose turn it is.
        pending: What it has seen.
        elapsed: Seconds that it has waited, at the beginning of this pass.
        patience: For how long it waits for others where it cannot compute; see :meth:`Shares.patience`.
    """
    if not pending.shards:
        return Complete()
    if pending.published:
        return Adopt(pending.published)
    late = tuple(shard for shard in pending.shards if elapsed >= shares.turn(shard))
    if late and pending.readable:
        return Compute(late)
    if pending.arrived:
        return LookAgain()
    if not pending.readable and elapsed >= patience:
        return GiveUp()
    return KeepWaiting()


def inputs_are_superseded(newest: int, sync: int, *, mending: bool) -> bool:
    """Whether a life whose inputs are gone starts again from newer state. Otherwise they are lost, which is an error.

    Args:
        newest: The newest sync of the fragment whose state is complete.
        sync: The sync that it adopts.
        mending: Whether the state after this very sync is what is damaged: then only newer state is of use.
    """
    return newest > sync or (newest == sync and not mending)
