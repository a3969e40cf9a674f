"""The result of a committed sync, on its way into one life's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .._repair import readable_done

if TYPE_CHECKING:
    from ..._arithmetic._layout import Layout
    from ..._exchange._resumable import ResumableJob
    from ..._wire._published import Shard
    from .._life._life import Life
    from .._life._progress import Progress
    from .._log._records import Commit, Done


@dataclass(slots=True)
class Result:
    """The state after a sync, as one life comes to it. Written by whoever takes or computes shards of it.

    Attributes:
        life: The life.
        commit: The sync's record, to be obeyed as it is.
        progress: What the life holds of the fragment: the state before, and more and more of this one.
        mending: Whether this state was published before, and some of it is damaged or gone.
        done: The record of this state, where it is mended and that can be read: nothing else is written.
        damaged: What is wrong with shards that the store holds.
        previous: The sync whose state it starts from.
    """

    life: Life
    commit: Commit
    progress: Progress
    mending: bool
    done: Done | None
    damaged: dict[int, str] = field(default_factory=dict)
    previous: int = field(init=False)

    def __post_init__(self) -> None:
        self.previous = self.progress.sync

    @classmethod
    def of(cls, life: Life, commit: Commit) -> Result:
        """Of the next sync of a fragment, from the state in memory."""
        mending = life.damage.mending.get(commit.fragment) == commit.sync
        done = readable_done(life, commit.sync, commit.fragment) if mending else None
        return cls(life, commit, life.fragments[commit.fragment], mending, done)

    @classmethod
    def again(cls, life: Life, commit: Commit, before: Progress) -> Result:
        """Of a sync that is adopted already, some of whose result is made again from the state ``before``."""
        done = life.fragments[commit.fragment].done()
        done = done or readable_done(life, commit.sync, commit.fragment)
        return cls(life, commit, before, True, done)

    @property
    def sync(self) -> int:
        """Number of the sync."""
        return self.commit.sync

    @property
    def index(self) -> int:
        """Which fragment it is of."""
        return self.commit.fragment

    @property
    def job(self) -> ResumableJob:
        """The fragment."""
        return self.progress.job

    @property
    def layout(self) -> Layout:
        """How the fragment is cut."""
        return self.progress.job.layout

    def key(self, shard: int) -> str:
        """Key of a shard."""
        return self.life.key(self.sync, self.index, shard)

    def shard(self, shard: int) -> Shard:
        """A shard of it."""
        return self.life.shard(self.sync, self.index, shard)

    def settle(self, shard: int, values: int, rest: int | None) -> None:
        """Memory holds the values of a shard, and these are its checksums."""
        self.progress.values_at[shard] = self.sync
        self.progress.sums[shard] = values
        self.progress.rests[shard] = rest
