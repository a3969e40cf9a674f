"""One life of a rank in an elastic run: who it is, and the parts of what it knows, each with its own writers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from ..._errors import CorruptedObjectError
from ..._exchange._traffic import Traffic
from ..._store._reread import read_again
from ..._timing import Wait
from .._log._attendance import Attendance
from .._log._keys import commit_key, done_key, shard_key
from .._log._records import Done, digest, of_run, read_record
from ._damage import Damage
from ._handover import Handover
from ._progress import published_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ..._arithmetic._sharded import Scratch
    from ..._store._api import Buffer
    from ..._store._patient import Patient
    from ..._timing import Timing
    from ..._wire._published import Shard
    from .._log._records import Commit, Manifest, Rollback
    from .._settings import Elastic
    from ._progress import Progress
    from ._standing import Standing

T = TypeVar("T")


@dataclass(slots=True)
class Seen:
    """When a life last saw that the prefix is still the run's; written by whoever looks, see :func:`.._start.watch_manifest`.

    Attributes:
        at: By its clock, in seconds.
    """

    at: float


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a rank. Nothing of it can be set from outside: its parts change, each by its own methods.

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
        standing: Where it stands in the log, and what it holds. Moved by loading, replaying and completing a sync.
        seen: When it last saw that the prefix is still the run's.
        damage: What is damaged, and what this life could write again.
        handover: What one sync leaves to the next.
        traffic: What the sync in progress has cost.
        attendance: What it has heard of the others.
    """

    store: Patient
    timing: Timing
    settings: Elastic
    manifest: Manifest
    run: str
    rank: int
    epoch: int
    claim: bytes
    chunk_bytes: int
    scratch: Scratch
    standing: Standing
    seen: Seen
    damage: Damage = field(default_factory=Damage)
    handover: Handover = field(default_factory=Handover)
    traffic: Traffic = field(default_factory=Traffic)
    attendance: Attendance = field(default_factory=Attendance)

    @property
    def fragments(self) -> Sequence[Progress]:
        """What it holds of each fragment."""
        return self.standing.fragments

    @property
    def sync(self) -> int:
        """The last sync that it has adopted."""
        return self.standing.sync

    @property
    def previous(self) -> str:
        """Digest of that sync's record; see :attr:`._standing.Standing.previous`."""
        return self.standing.previous

    @property
    def members(self) -> Mapping[int, int]:
        """Epoch by rank of that sync's members; see :attr:`._standing.Standing.members`."""
        return self.standing.members

    @property
    def rollback(self) -> int:
        """Number of the newest rollback in the log; 0 where there was none."""
        return self.standing.rollback

    @property
    def rollbacks(self) -> Sequence[tuple[Rollback, str]]:
        """The rollbacks that bear on what was loaded; see :attr:`._standing.Standing.rollbacks`."""
        return self.standing.rollbacks

    @property
    def now(self) -> float:
        """Seconds of a clock that stands still while the store is away."""
        return self.timing.clock() - self.store.downtime

    @property
    def late(self) -> bool:
        """Whether this life has stood still for a grace: the others may have gone on without it."""
        return self.standing.seconds >= self.settings.grace

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
        return self.standing.index(sync)

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
            self.traffic.count_sent(size)
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
        entry = self.read(
            key, lambda data: (read_record(data, sync, self.origin(key)), digest(data))
        )
        return entry and (of_run(entry[0], self.run, self.origin(key)), entry[1])

    def done(self, sync: int, fragment: int) -> Done | None:
        """The record of a complete state, if there is one.

        Raises:
            CorruptedObjectError: It is damaged.
            RunExistsError: It is of another run.
        """
        key = done_key(sync, fragment)
        record = self.read(key, lambda data: Done.from_json(data, sync, fragment, self.origin(key)))
        return record and of_run(record, self.run, self.origin(key))

    def verify(self, commit: Commit) -> None:
        """Refuse a record that is not the next one of the log.

        Raises:
            CorruptedObjectError: It does not follow the one before it.
        """
        if not self.standing.follows(commit):
            raise self.does_not_follow(commit)

    def does_not_follow(self, commit: Commit) -> CorruptedObjectError:
        """The error of a record that is not the next one of the log."""
        return CorruptedObjectError(
            f"{self.origin(commit_key(commit.sync))} is whole, but does not follow the record before it, as this replica "
            "has read that: objects of two runs are mixed below this prefix, or records were removed and written again"
        )
