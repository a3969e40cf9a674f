"""What is known of the published states of a run, whatever its membership."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .._elastic._log._records import Rollback


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A shard of a fragment's state.

    Attributes:
        key: Where it is.
        seed: Seed of the checksum of its values.
        checksum: What that must be, where a record says so.
    """

    key: str
    seed: int
    checksum: int | None = None


class Source(Protocol):
    """The published states of a run, by the numbers that they have in its log: in strict runs, how many outer steps it had taken.

    Attributes:
        run_id: The launch it belongs to.
        fragments: For every fragment, what its files look like.
        unsynced: The same of what is not synced; empty where there is nothing.
        first: Outer steps that had been taken when the run began.
        rollbacks: The records that say from which older states the run went on, the oldest first; as of the last call of
            :meth:`complete`.
        unknown: Number of the newest rollback whose record cannot be read, as of that call; 0 if all can. States of before
            are not told of then.
    """

    run_id: str
    fragments: Sequence[Mapping[str, Any]]
    unsynced: Mapping[str, Any]
    first: int
    rollbacks: Sequence[Rollback]
    unknown: int

    def complete(self) -> list[set[int]]:
        """For every fragment, after which syncs its state is completely published, and was not given up."""
        ...

    def outer_steps(self, number: int) -> int:
        """How many outer steps the model had taken after a number of the log."""
        ...

    def files(self, index: int, sync: int) -> list[PublishedFile]:
        """The shards of a fragment's state after a sync."""
        ...

    def expected(self) -> list[int]:
        """Numbers of the log whose states must once have been there, or are just being published; the newest first.

        Whatever tells of a sync counts, not just its records. Old ones may have been deleted since, by rule. Rollbacks are known
        as of the last call of :meth:`complete`.
        """
        ...

    def missing(self, index: int, sync: int) -> list[str]:
        """Keys that a fragment's state after a sync is made of, and that are not there."""
        ...


def lacking(source: Source, number: int) -> list[str]:
    """Keys of what is not there of the whole model's state after a number of the log."""
    return [
        key for index, own in enumerate(state(source, number)) for key in source.missing(index, own)
    ]


def states(source: Source, complete: Sequence[set[int]]) -> list[int]:
    """After which numbers of the log the whole model can be had, the newest first."""
    # A rollback stands for the states that the run went on from.
    numbers = {rollback.sync for rollback in source.rollbacks}.union(*complete)
    whole: dict[tuple[int, ...], int] = {}
    for number in sorted(numbers):
        parts = state(source, number)
        if all(part in syncs for part, syncs in zip(parts, complete, strict=True)):
            whole.setdefault(tuple(parts), number)
    return sorted(whole.values(), reverse=True)


def state(source: Source, number: int) -> list[int]:
    """The state after a number of the log: for every fragment, the last sync that was its own."""
    count = len(source.fragments)
    own = [max(source.first, number - (number - 1 - index) % count) for index in range(count)]
    before = [rollback for rollback in source.rollbacks if rollback.sync <= number]
    if before:
        own = [
            last if last > before[-1].sync else kept
            for last, kept in zip(own, before[-1].states, strict=True)
        ]
    return own


def outer_steps(source: Source, number: int) -> int:
    """How many outer steps the model had taken then: rollbacks and what they gave up are in the log, and not in the model."""
    before = [rollback for rollback in source.rollbacks if rollback.sync <= number]
    return number - len(
        {sync for rollback in before for sync in (rollback.sync, *rollback.given_up)}
    )
