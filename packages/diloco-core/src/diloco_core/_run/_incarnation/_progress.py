"""What an incarnation holds of one fragment, and the files in which its states are published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from ..._arithmetic._clip import Clipped
from ..._exchange._resumable import ResumableJob
from ..._wire._coded import CodedShard
from ..._wire._published import Shard, Sums
from ..._wire._sections import seed
from .._records._keys import Delta
from .._records._records import Commit, Done, state_digest
from .._records._rules import is_whole


@dataclass(slots=True)
class Progress:
    """What an incarnation holds of one fragment.

    Attributes:
        job: The fragment.
        index: Its index among the fragments.
        sync: The last sync of the fragment that was adopted (0: the initial state).
        sums: Checksums of the shards' values after that sync.
        rests: Checksums of everything else in the shards' files; None if not known (gather).
        commit: The record of that sync; None for the initial state.
        values_at: For every shard, the sync after which its values in memory are valid; None if
            they are undefined.
        outer_at: The same for the outer optimizer's state; None if it is not in memory.
        unfinished: The record of the state that is being published (gather only).
        without: For shards of which a contribution was lost: which one, as the shard's header says.
        clipped: The last sync whose contributions this incarnation has clipped, and how; see
            :attr:`.SyncReport.clipped`.
    """

    job: ResumableJob
    index: int
    sync: int = 0
    sums: list[int] = field(default_factory=list)
    rests: list[int | None] = field(default_factory=list)
    commit: Commit | None = None
    unfinished: Done | None = None
    clipped: tuple[int, tuple[Clipped, ...]] = (0, ())
    without: dict[int, str] = field(default_factory=dict)
    values_at: list[int | None] = field(init=False)
    outer_at: list[int | None] = field(init=False)

    def __post_init__(self) -> None:
        nothing: list[int | None] = [None] * self.job.layout.shards
        self.rests = self.rests or list(nothing)
        self.values_at, self.outer_at = list(nothing), nothing

    @classmethod
    def recorded(cls, job: ResumableJob, done: Done) -> Progress:
        """Make the progress of an incarnation that is about to read the state of a record.

        It holds nothing of that state yet.
        """
        return cls(job, done.fragment, done.sync, list(done.sums), list(done.rests), done.commit)

    def expected(self, number: int) -> Sums:
        """Return the checksums of a shard's file that the record of this state names.

        The progress must have been made by :meth:`recorded`.
        """
        rest = self.rests[number]
        assert rest is not None
        return Sums(self.sums[number], rest)

    def done(self, commit: Commit, rests: Iterable[int | None] | None = None) -> Done:
        """The record of the state in memory after a sync.

        Args:
            commit: The record of the sync.
            rests: Its ``rests``, where memory does not hold them (gather).
        """
        known = tuple(rest for rest in rests or self.rests if rest is not None)
        full = publishes_whole(self.job, commit.sync)
        return Done(commit.sync, commit.fragment, tuple(self.sums), known, commit, full)

    @property
    def digest(self) -> str:
        """Digest of the fragment's state after the last sync."""
        return state_digest(self.sums)

    @property
    def positions(self) -> Mapping[int, int]:
        """The inner steps that have been counted, by rank."""
        return self.commit.positions if self.commit else {}

    @property
    def outer_steps(self) -> int:
        """Outer steps that this state has taken."""
        return self.commit.outer_steps if self.commit else 0

    def counting(self, members: Iterable[Delta]) -> dict[int, int]:
        """The inner steps that will have been counted when these contributions are, by rank."""
        return {**self.positions, **{member.rank: member.stop for member in members}}

    def forget_outer(self, shard: int, chunk_bytes: int) -> None:
        """Drop a shard's outer state, which is out of date or has to be read again."""
        # This is done even if outer_at says that there is none: a failed load may have left some.
        self.job.forget_outer(self.job.layout.chunks(shard, chunk_bytes))
        self.outer_at[shard] = None


def published_shard(
    job: ResumableJob, sync: int, number: int, origin: str, chunk_bytes: int
) -> Shard:
    """A shard of a fragment's state after a sync.

    ``origin`` is the name of the run or, for sync 0, the initial state's nonce.
    """
    section_seed = partial(seed, job.fingerprint, origin, sync)
    if sync and job.coded is not None:
        full = publishes_whole(job, sync)
        return CodedShard(job, number, section_seed, chunk_bytes, job.coded, full=full)
    return Shard(job, number, section_seed, chunk_bytes)


def publishes_whole(job: ResumableJob, sync: int) -> bool:
    """Say whether the files of a fragment's state after a sync hold all values.

    See :func:`.._records._rules.is_whole`.
    """
    return job.coded is None or is_whole(sync, job.coded.fragments, job.coded.full_every)
