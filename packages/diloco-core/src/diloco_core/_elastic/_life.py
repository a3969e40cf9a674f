"""One life of a rank in an elastic run: where it stands in the log of syncs, and what it holds in memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from .._errors import CorruptedObjectError
from .._store._reread import read_again
from .._timing import Wait
from .._wire._published import Shard
from .._wire._sections import seed
from ._log._attendance import Attendance
from ._log._delta import DeltaFormat
from ._log._keys import commit_key, done_key, shard_key
from ._log._records import Done, digest, of_run, read_record, state_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from .._arithmetic._layout import Layout
    from .._arithmetic._sharded import Scratch
    from .._exchange._resumable import ResumableJob
    from .._store._api import Buffer
    from .._store._patient import Patient
    from .._timing import Timing
    from ._log._keys import Delta, Hint
    from ._log._records import Commit, Manifest, Rollback
    from ._settings import Elastic

T = TypeVar("T")


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


@dataclass(slots=True)
class Traffic:
    """Counters of one sync: payload bytes and seconds."""

    sent: int = 0
    received: int = 0
    waited: float = 0.0


@dataclass(slots=True)
class Life:
    """One life of a rank.

    Attributes:
        store: The run's prefix.
        timing: Limits and clock.
        settings: How this replica behaves.
        manifest: What the run is.
        run: Its name.
        rank: Its rank.
        epoch: Which life of the rank it is.
        claim: The record by which it has claimed that.
        chunk_bytes: Bytes handled at once.
        scratch: Buffers.
        fragments: What it holds.
        sync: The last sync it has adopted.
        previous: Digest of that sync's record (of the manifest, before the first); empty where that was given up and not read.
        members: Epoch by rank of that sync's members; all ranks, before the first.
        traffic: What the sync in progress has cost.
        differed: Whether it has reloaded because its state was not that of the others, and not completed a sync since.
        absent: Ranks whose shards others had to update: they are not waited for.
        former: Hints of lives that left before the run was resumed: they are waited for.
        open: The own contribution to a sync that this life did not wait for to its end.
        rollback: Number of the newest rollback in the log; 0 where there was none.
        rollbacks: The rollbacks that the last loading took into account, in the order of the log, with their records' digests.
        mending: For fragments whose newest state is damaged, after which sync that is; it is made again from the one before.
        reasons: What is damaged of these states.
        bad: Fragments and syncs whose published state is damaged where loading it does not show.
        answered: Who was answered when it asked for repair.
        decided: The last record that this life has created.
        stood_at: When it came to stand at its last sync, by its clock.
        seen_at: When it last saw that the prefix is still the run's.
        attendance: What it has heard of the others.
    """

    store: Patient
    timing: Timing
    settings: Elastic
    manifest: Manifest
    rank: int
    epoch: int
    claim: bytes
    chunk_bytes: int
    scratch: Scratch
    fragments: list[Progress]
    sync: int = 0
    previous: str = ""
    members: dict[int, int] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    differed: bool = False
    absent: set[int] = field(default_factory=set)
    former: set[str] = field(default_factory=set)
    open: Delta | None = None
    rollback: int = 0
    rollbacks: list[tuple[Rollback, str]] = field(default_factory=list)
    mending: dict[int, int] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    bad: set[tuple[int, int]] = field(default_factory=set)
    answered: set[Hint] = field(default_factory=set)
    decided: Commit | None = None
    stood_at: float = 0.0
    seen_at: float = 0.0
    attendance: Attendance = field(default_factory=Attendance)
    run: str = field(init=False)
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.run = self.manifest.run()

    @property
    def now(self) -> float:
        """Seconds of a clock that stands still while the store is away."""
        return self.timing.clock() - self.store.downtime

    @property
    def late(self) -> bool:
        """Whether this life has stood still for a grace: the others may have gone on without it."""
        return self.timing.clock() - self.stood_at >= self.settings.grace

    @property
    def outer_steps(self) -> int:
        """Outer steps that the model in memory has taken; what a rollback gave up is not among them."""
        return sum(progress.outer_steps for progress in self.fragments)

    @property
    def gather(self) -> bool:
        """Whether everybody updates everything."""
        return self.manifest.topology == "gather"

    def index(self, sync: int) -> int:
        """Which fragment a sync is of."""
        return (sync - 1) % len(self.fragments)

    def published(self, sync: int) -> bool:
        """Whether the state after a sync is published by rule."""
        return (
            not self.gather
            or ((sync - 1) // len(self.fragments) + 1) % self.manifest.publish_every == 0
        )

    def create(self, key: str, parts: Callable[[], Iterable[Buffer]]) -> bool:
        """Publish an object unless it is there, and count its bytes; returns whether this call wrote it. Thread-safe.

        What the parts show must not change until it is through: over a network they are sent without a copy.
        """
        size = 0

        def counted() -> Iterator[Buffer]:
            nonlocal size
            size = 0
            for part in parts():
                size += len(part)
                yield part

        created = self.store.create(key, counted if self.store.near else lambda: list(counted()))
        if created:
            with self._counting:
                self.traffic.sent += size
        return created

    def key(self, sync: int, fragment: int, shard: int) -> str:
        """Key of a published shard."""
        return shard_key(sync, fragment, shard, self.manifest.initial)

    def origin(self, key: str) -> str:
        """A key as shown in errors."""
        return f"{self.store.uri}/{key}"

    def bound(self, key: str) -> str:
        """What binds an object to its key and to the run; the seed of its checksum is made of it."""
        return f"{self.run}/{key}"

    def shard(self, sync: int, fragment: int, number: int) -> Shard:
        """A shard of the state after a sync."""
        job, of = self.fragments[fragment].job, self.run if sync else self.manifest.initial
        return published_shard(job, sync, number, of, self.chunk_bytes)

    def wait(
        self,
        timeout: float,
        expired: Callable[[], Exception],
        alarms: Iterable[float],
        notice: Callable[[float], str] = lambda _: "",
    ) -> Wait:
        """A wait for others. Time in which this life could not reach the store counts towards no limit: nor could they."""
        return Wait(
            self.timing,
            self.store.near,
            timeout,
            lambda: None,
            expired,
            alarms,
            downtime=lambda: self.store.downtime,
            notice=notice,
            notice_after=self.settings.grace,
        )

    def read(self, key: str, parse: Callable[[bytes], T]) -> T | None:
        """A record, read again where it is not as it was written; None where there is none.

        Raises:
            CorruptedObjectError: It is damaged in the store.
        """

        def read() -> T | None:
            data = self.store.get(key)
            return None if data is None else parse(data)

        return read_again(self.timing, read)

    def again(self, read: Callable[[], T]) -> T:
        """What ``read`` returns, called again where what it reads is not as it was written."""
        return read_again(self.timing, read)

    def log(self, sync: int) -> tuple[Commit | Rollback, str] | None:
        """The record of the log with this number and its digest, if there is one.

        Raises:
            CorruptedObjectError: It is damaged.
            RunExistsError: It is of another run.
        """
        key = commit_key(sync)
        found = self.read(
            key, lambda data: (read_record(data, sync, self.origin(key)), digest(data))
        )
        return found and (of_run(found[0], self.run, self.origin(key)), found[1])

    def done(self, sync: int, fragment: int) -> Done | None:
        """The record of a complete state, if there is one.

        Raises:
            CorruptedObjectError: It is damaged.
            RunExistsError: It is of another run.
        """
        key = done_key(sync, fragment)
        found = self.read(key, lambda data: Done.from_json(data, sync, fragment, self.origin(key)))
        return found and of_run(found, self.run, self.origin(key))

    def verify(self, commit: Commit) -> None:
        """Refuse a record that is not the next one of the log.

        Raises:
            CorruptedObjectError: It does not follow the one before it.
        """
        if not self.follows(commit):
            raise self.does_not_follow(commit)

    def follows(self, commit: Commit) -> bool:
        """Whether a record is the next one of the log, as far as this life has read that."""
        follows = (commit.sync, commit.fragment) == (self.sync + 1, self.index(self.sync + 1))
        if self.previous:
            follows = follows and (commit.previous, commit.rollback) == (
                self.previous,
                self.rollback,
            )
        return follows and self._counts_on(commit)

    def does_not_follow(self, commit: Commit) -> CorruptedObjectError:
        """The error of a record that is not the next one of the log."""
        return CorruptedObjectError(
            f"{self.origin(commit_key(commit.sync))} is whole, but does not follow the record before it, as this replica "
            "has read that: objects of two runs are mixed below this prefix, or records were removed and written again"
        )

    def _counts_on(self, commit: Commit) -> bool:
        """Whether a record counts on from the state before it; of a state that is in memory already, that is not known."""
        progress = self.fragments[commit.fragment]
        # What was loaded of this fragment may be newer than what was loaded of the others, from where the log is replayed.
        if commit.sync <= progress.sync:
            return True
        counted = progress.counting(commit.members), progress.outer_steps + 1
        return (commit.positions, commit.outer_steps) == counted

    def stands_at(self, rollback: Rollback) -> bool:
        """Whether memory holds what the run goes on from after a rollback, or newer states."""
        held = zip(self.fragments, rollback.states, strict=True)
        return all(
            progress.sync == state or progress.sync > rollback.sync for progress, state in held
        )

    def pass_over(self, sync: int) -> None:
        """A sync was given up: nobody has to be able to read its record, or to compute its result."""
        self.sync = sync
        self.previous = ""

    def turn_back(self, rollback: Rollback, record: str) -> None:
        """This life stands where the run goes on after a rollback whose record has this digest."""
        self.sync = self.rollback = rollback.sync
        self.previous = record
        # As at the beginning: whoever comes is waited for.
        self.members = dict.fromkeys(range(self.manifest.world_size), 0)

    def advance(self, commit: Commit, record: str) -> None:
        """This life has adopted a sync whose record has this digest."""
        progress = self.fragments[commit.fragment]
        progress.sync = commit.sync
        progress.commit = commit
        self.skip(commit, record)

    def skip(self, commit: Commit, record: str) -> None:
        """The state in memory holds this sync already.

        Raises:
            CorruptedObjectError: The state after this sync is that of another record with the same number.
        """
        progress = self.fragments[commit.fragment]
        if progress.sync == commit.sync and progress.commit != commit:
            raise CorruptedObjectError(
                f"{self.origin(commit_key(commit.sync))} is whole, but the state after that sync was published for another "
                "record: that was lost and decided again, or objects of two runs are mixed below this prefix"
            )
        self.stood_at = self.timing.clock()
        self.sync = commit.sync
        self.rollback = commit.rollback
        self.previous = record
        self.members = {member.rank: member.epoch for member in commit.members}


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
