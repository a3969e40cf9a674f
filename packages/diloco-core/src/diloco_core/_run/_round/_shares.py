"""The decision which member computes which shard of a committed sync, and when.

An incarnation decides this while it adopts the result, in step 11 of the protocol. Shard k belongs
to member k mod n of the record. An incarnation that has waited for it too long does its owner's
work. A shard is created only once, so it does no harm if two incarnations do this at the same time:
all incarnations take the bytes that are there. Nothing here reads a store or a clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_STAGGER = 0.5


@dataclass(frozen=True, slots=True)
class Shares:
    """The shards of a committed sync, as one incarnation sees them (only in the sharded topology).

    Attributes:
        sync: Number of the sync.
        members: Ranks of the record's members, in order.
        rank: Rank of the incarnation.
        grace: Seconds that it waits for an owner.
        mending: Whether the result was published before, and a part of it is damaged or gone. Then
            all incarnations, including the owners, take undamaged shards as they are; any
            incarnation may compute a missing one, without waiting for its owner.
        fixed: Whether only its owner computes a shard.
    """

    sync: int
    members: tuple[int, ...]
    rank: int
    grace: float
    mending: bool = False
    fixed: bool = False

    @property
    def member(self) -> int | None:
        """The incarnation's place among the members; None if the record leaves its rank out."""
        return self.members.index(self.rank) if self.rank in self.members else None

    @property
    def designated(self) -> bool:
        """Say whether this incarnation does the sync's chores, which go from member to member."""
        return self.member == self.sync % len(self.members)

    def owner(self, shard: int) -> int:
        """The place of the member that updates a shard."""
        return shard % len(self.members)

    def own(self, shards: Iterable[int]) -> list[int]:
        """Return the shards that the incarnation updates without looking for them first."""
        if self.mending:
            return []
        return [shard for shard in shards if self.owner(shard) == self.member]

    def turn(self, shard: int) -> float:
        """Seconds after which the incarnation does the work of a shard's owner.

        The next member's turn comes first, then that of the member after it, and so on, so that not
        all replicas do the same work at once. An incarnation that the record leaves out comes last.
        """
        if self.fixed:
            return math.inf
        if self.mending:
            return 0.0
        count, member = len(self.members), self.member
        distance = count if member is None else (member - self.owner(shard)) % count
        return self.grace + (distance - 1) * min(_STAGGER, self.grace / 10)

    def late(self, missing: Iterable[int], elapsed: float) -> list[int]:
        """Return the shards that it is the incarnation's turn to compute, since they are late."""
        return [shard for shard in missing if elapsed >= self.turn(shard)]

    def late_owners(self, pending: Iterable[int], elapsed: float) -> set[int]:
        """Ranks that have not published their shards in time.

        Most likely they are gone: the next sync does not wait for them.
        """
        if elapsed < self.grace:
            return set()
        return {self.members[self.owner(shard)] for shard in pending} - {self.rank}

    def patience(self, shards: Iterable[int]) -> float:
        """Return for how many seconds an incarnation waits for shards that it cannot compute.

        By then, each of the others has had its turn.
        """
        return self.grace + (0.0 if self.fixed else max(map(self.turn, shards)))


def inputs_are_superseded(newest: int, sync: int, *, mending: bool) -> bool:
    """Say whether contributions are gone because a newer state is complete.

    Then the incarnation starts again from that state. If not, they are lost, which is an error.

    Args:
        newest: The newest sync of the fragment whose state is complete.
        sync: The sync that the incarnation adopts.
        mending: Whether the damaged state is that after this sync, so that only a newer one helps.
    """
    return newest > sync or (newest == sync and not mending)
