"""The result of a committed sync, while one life takes or computes it."""

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
    from .._records._records import Commit, Done


@dataclass(slots=True)
class Result:
    """The state after a sync, while one life takes or computes it. Written by the code that takes or computes shards.

    Attributes:
        life: The life.
        commit: The sync's record, to be obeyed as it is.
        progress: What the life holds of the fragment: at first the state before, and then more and more shards of this one.
        mending: Whether this state was published before, and a part of it is damaged or gone.
        done: The record of this state, if the state is being mended and the record can be read: only what it says is written.
        damaged: What is wrong with damaged shards in the store, by number.
        without: For shards that this life has computed without its rank's own part: whose part that is.
        previous: The sync from whose state the result is computed.
    """

    life: Life
    commit: Commit
    progress: Progress
    mending: bool
    done: Done | None
    damaged: dict[int, str] = field(default_factory=dict)
    without: dict[int, str] = field(default_factory=dict)
    previous: int = field(init=False)

    def __post_init__(self) -> None:
        self.previous = self.progress.sync

    @classmethod
    def of(cls, life: Life, commit: Commit) -> Result:
        """The result of the fragment's next sync, computed from the state in memory."""
        mending = life.damage.mending.get(commit.fragment) == commit.sync
        done = readable_done(life, commit.sync, commit.fragment) if mending else None
        return cls(life, commit, life.fragments[commit.fragment], mending, done)

    @classmethod
    def again(cls, life: Life, commit: Commit, before: Progress) -> Result:
        """The result of a sync that is adopted already, of which a part is made again from the state ``before``."""
        done = life.fragments[commit.fragment].done()
        done = done or readable_done(life, commit.sync, commit.fragment)
        return cls(life, commit, before, True, done)

    @property
    def sync(self) -> int:
        """Number of the sync."""
        return self.commit.sync

    @property
    def index(self) -> int:
        """Index of the fragment."""
        return self.commit.fragment

    @property
    def job(self) -> ResumableJob:
        """The fragment."""
        return self.progress.job

    @property
    def layout(self) -> Layout:
        """How the fragment is divided."""
        return self.progress.job.layout

    def key(self, shard: int) -> str:
        """Key of a shard of the result."""
        return self.life.key(self.sync, self.index, shard)

    def shard(self, shard: int) -> Shard:
        """A shard of the result."""
        return self.life.shard(self.sync, self.index, shard)

    def settle(self, shard: int, values: int, rest: int | None) -> None:
        """Note that memory now holds the values of a shard, and that these are its checksums."""
        self.progress.values_at[shard] = self.sync
        self.progress.without.pop(shard, None)
        if shard in self.without:
            self.progress.without[shard] = self.without[shard]
        self.progress.sums[shard] = values
        self.progress.rests[shard] = rest
