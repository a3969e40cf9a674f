"""What a life holds of one fragment, and the files in which its states are published."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError
from ..._wire._published import Shard
from ..._wire._sections import seed
from .._log._delta import DeltaFormat
from .._log._records import Done, state_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..._arithmetic._layout import Layout
    from ..._exchange._resumable import ResumableJob
    from .._log._keys import Delta
    from .._log._records import Commit


@dataclass(slots=True)
class Progress:
    """What a life holds of one fragment.

    Attributes:
        job: The fragment.
        sync: The last sync of it that was adopted (0: the initial state).
        sums: Checksums of the shards' values after it.
        rests: Checksums of everything else in the shards' files; None where they are not known (gather).
        commit: The record of that sync; None for the initial state.
        values_at: For every shard, after which sync the values in memory are; None where they are undefined.
        outer_at: The same for the outer optimizer's state; None where it is not in memory.
        unfinished: What is being published (gather only).
        format: What contributions to it look like.
    """

    job: ResumableJob
    sync: int
    sums: list[int]
    values_at: list[int | None]
    outer_at: list[int | None]
    rests: list[int | None]
    commit: Commit | None = None
    unfinished: Done | None = None
    format: DeltaFormat = field(init=False)

    def __post_init__(self) -> None:
        self.format = DeltaFormat(self.job)

    @classmethod
    def empty(cls, job: ResumableJob) -> Progress:
        """Of a life that holds nothing yet."""
        shards = job.layout.shards
        return cls(job, 0, [], [None] * shards, [None] * shards, [None] * shards)

    @classmethod
    def recorded(cls, job: ResumableJob, done: Done) -> Progress:
        """Of a life that is about to read the state that a record speaks of, and holds nothing of it yet."""
        nowhere: list[int | None] = [None] * job.layout.shards
        return cls(
            job, done.sync, list(done.sums), nowhere, list(nowhere), list(done.rests), done.commit
        )

    def done(self) -> Done | None:
        """The record of this state; None where memory does not tell what it says."""
        rests = [rest for rest in self.rests if rest is not None]
        if self.commit is None or len(rests) != len(self.sums):
            return None
        return Done(self.sync, self.commit.fragment, tuple(self.sums), tuple(rests), self.commit)

    @property
    def digest(self) -> str:
        """Digest of the state after the last sync."""
        return state_digest(self.sums)

    @property
    def positions(self) -> Mapping[int, int]:
        """Inner steps of every rank that have been counted."""
        return self.commit.positions if self.commit else {}

    @property
    def outer_steps(self) -> int:
        """Outer steps that this state has taken."""
        return self.commit.outer_steps if self.commit else 0

    def counting(self, members: Iterable[Delta]) -> dict[int, int]:
        """Inner steps of every rank that will have been counted when these contributions are."""
        return {**self.positions, **{member.rank: member.stop for member in members}}

    def forget_outer(self, shard: int, chunk_bytes: int) -> None:
        """Let go of a shard's outer state: somebody else has updated it."""
        # Also where nothing is known of it: a loading that failed may have left some.
        self.job.forget_outer(self.job.layout.chunks(shard, chunk_bytes))
        self.outer_at[shard] = None


def published_shard(job: ResumableJob, sync: int, number: int, of: str, chunk_bytes: int) -> Shard:
    """A shard of a fragment's state after a sync; ``of``: name of the run, or for sync 0 the initial state's nonce."""

    def section_seed(*what: object) -> int:
        return published_seed(job.fingerprint, of, sync, *what)

    return Shard(job, number, section_seed, chunk_bytes)


def published_seed(fingerprint: str, of: str, sync: int, *what: object) -> int:
    """Seed of a checksum in a published shard; ``of`` as for :func:`published_shard`."""
    return seed(fingerprint, of, sync, *what)


def not_as_recorded(origin: str) -> CorruptedObjectError:
    """The error of an object that is whole, and not the one that its record means."""
    return CorruptedObjectError(f"{origin} is not what the record of its sync says")


def layout_bytes(layout: Layout) -> int:
    """Size of all values of a layout in bytes."""
    return sum(group.numel * group.dtype.itemsize for group in layout.groups)
