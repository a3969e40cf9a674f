"""One incarnation of a rank in a run: its identity and what it knows.

What it knows is divided into parts, each of which says which code may change it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ..._arithmetic._sharded import Scratch
from ..._errors import CorruptedObjectError
from ..._exchange._resumable import ResumableJob
from ..._exchange._telemetry import Doing
from ..._retry import NOTICE_SECONDS
from ..._store._api import Buffer, ObjectReader
from ..._store._patient import Patient
from ..._store._reread import read_again
from ..._timing import Timing
from ..._wire._delta import DeltaFormat
from ..._wire._published import Shard
from .._records._attendance import Attendance
from .._records._keys import MANIFEST, Delta, Hint, commit_key, commit_sync, done_key, shard_key
from .._records._manifest import Manifest
from .._records._records import Commit, Done, Rollback, of_run, read_record
from .._records._rules import is_whole, made_of, newest_done
from .._settings import Joiner, Settings
from ._progress import Progress, published_shard, publishes_whole
from ._standing import Damage, Handover, Standing, Traffic

T = TypeVar("T")

LOST = (
    "%s. Writing it again with the same content. Something outside this run deletes or changes its "
    "objects: find out what does, and stop it."
)
"""What the log says of an object that is damaged or gone."""
_log = logging.getLogger("diloco_core")


class Others(Protocol):
    """The watcher over the ranks that an incarnation of a fixed run waits for.

    See :class:`.._policy._others.Others`.
    """

    def check(
        self,
        incarnation: Incarnation,
        missing: Collection[int],
        sync: int,
        listing: Iterable[str],
        *,
        final: bool = False,
    ) -> bool:
        """Look for reasons why some ranks may never do their part.

        Returns whether the sync's number is taken by now.
        """

    def compare(self, incarnation: Incarnation, contributions: Iterable[Delta]) -> None:
        """Refuse to go on with ranks that were started with other settings."""

    def is_past(self, hint: Hint) -> bool:
        """Say whether the incarnation of this hint ended before this one continued the run."""

    def stop(self) -> None:
        """Give no more signs of life; repeatable."""


class _OfRank(logging.LoggerAdapter[logging.Logger]):
    """The package's log, in which every message begins with the rank."""

    def process(self, msg: str, kwargs: MutableMapping[str, Any]) -> tuple[str, Any]:
        """The message with the rank."""
        return f"rank {(self.extra or {})['rank']}: {msg}", kwargs


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One incarnation of a rank.

    Its attributes cannot be set; its parts change only by their own methods.

    Attributes:
        store: The run's prefix.
        timing: Limits and clock.
        settings: How this replica behaves.
        manifest: The run's manifest.
        run: Name of the run.
        rank: The rank.
        epoch: The number of this incarnation among those of its rank.
        claim: The record with which it has claimed that epoch.
        chunk_bytes: Bytes handled at once.
        scratch: Buffers.
        standing: Where it stands in the log, and what it holds. Moved by loading, replaying and
            completing a sync.
        damage: What is damaged, and what this incarnation could write again.
        handover: What one sync leaves to the next.
        traffic: What the sync in progress has cost.
        attendance: What it has heard from the other ranks.
        doing: What it does at the moment, for telemetry.
        formats: The formats of contributions, by fragment; see :meth:`format`.
        others: In fixed runs: watches over the ranks that it waits for.
        passed_over: In fixed runs: the ends that it saw before it claimed its epoch, and goes past.
    """

    store: Patient
    timing: Timing
    settings: Settings
    manifest: Manifest
    run: str
    rank: int
    chunk_bytes: int
    scratch: Scratch
    standing: Standing
    attendance: Attendance
    epoch: int = 0
    claim: bytes = b""
    damage: Damage = field(default_factory=Damage)
    handover: Handover = field(default_factory=Handover)
    traffic: Traffic = field(default_factory=Traffic)
    doing: Doing = field(default_factory=Doing)
    formats: dict[int, DeltaFormat] = field(default_factory=dict)
    others: Others | None = None
    passed_over: Collection[int] = ()

    @classmethod
    def reading(
        cls, store: Patient, jobs: Sequence[ResumableJob], manifest: Manifest, joiner: Joiner
    ) -> Incarnation:
        """Make what reads a run without a claim, and so must not write there.

        Args:
            store: The run's prefix.
            jobs: All fragments, in the order in which they are synced.
            manifest: The run's manifest.
            joiner: This replica.
        """
        fragments = [Progress(job, number) for number, job in enumerate(jobs)]
        return cls(
            store=store,
            timing=store.timing,
            settings=joiner.settings,
            manifest=manifest,
            run=manifest.run(),
            rank=joiner.rank,
            chunk_bytes=joiner.chunk_bytes,
            scratch=Scratch(joiner.chunk_bytes),
            standing=Standing(fragments, manifest, store.uri, store.timing.clock),
            attendance=Attendance(joiner.rank, store.get),
        )

    @property
    def say(self) -> logging.LoggerAdapter[logging.Logger]:
        """Return a log whose messages begin with the rank of this incarnation."""
        return _OfRank(_log, {"rank": self.rank})

    @property
    def fixed(self) -> bool:
        """Say whether all ranks are in every sync."""
        return self.settings.fixed

    @property
    def deletes_own(self) -> bool:
        """Say whether each rank deletes what it has written itself, and writes over it next.

        That is so in fixed runs where listings cost nothing.
        """
        return self.fixed and self.store.near

    @property
    def fragments(self) -> Sequence[Progress]:
        """Return what this incarnation holds of each fragment."""
        return self.standing.fragments

    @property
    def sync(self) -> int:
        """The last sync that this incarnation has adopted."""
        return self.standing.sync

    @property
    def rollback(self) -> int:
        """Number of the newest rollback in the log; 0 if there was none."""
        return self.standing.rollback

    @property
    def now(self) -> float:
        """Seconds of a clock that stops while the store cannot be reached."""
        return self.timing.clock() - self.store.downtime

    @property
    def late(self) -> bool:
        """Say whether this incarnation has stood still for a grace.

        The others may then have gone on without it.
        """
        return self.standing.seconds >= self.settings.grace

    @property
    def gather(self) -> bool:
        """Say whether the topology is ``gather``, in which every replica updates all shards."""
        return self.manifest.topology == "gather"

    def format(self, index: int) -> DeltaFormat:
        """The format of contributions to a fragment.

        In fixed runs no replica sends the shards that it updates itself.
        """
        if index not in self.formats:
            job, size = self.fragments[index].job, self.manifest.world_size
            if self.fixed:
                shards = range(job.layout.shards)
                self.formats[index] = DeltaFormat(
                    job, omit=lambda rank: shards[rank::size], sends_first=lambda rank: not rank
                )
            else:
                self.formats[index] = DeltaFormat(job, verify_first=False)
        return self.formats[index]

    def take_mean(self, job: ResumableJob) -> None:
        """Sync these tensors next, whose values just become their mean.

        They have no state before and none afterwards.
        """
        progress = Progress(job, 0, self.sync)
        # In place of checksums, the run: contributions to means of another run have another base.
        progress.sums = [int(self.run[:16], 16)] * job.layout.shards
        progress.values_at = [self.sync] * job.layout.shards
        progress.outer_at = [self.sync] * job.layout.shards
        self.standing.fragments[0] = progress
        self.formats.clear()

    @property
    def takes_means(self) -> bool:
        """Say whether the run has no state: its syncs are plain means."""
        return "operation" in self.manifest.settings

    def index(self, sync: int) -> int:
        """The index of the fragment that a sync is of."""
        return self.standing.index(sync)

    def published(self, sync: int) -> bool:
        """Say whether the rule says that the state after a sync is published."""
        every = self.manifest.publish_every if self.gather else 1
        return is_whole(sync, len(self.fragments), every)

    @property
    def whole_every(self) -> int:
        """The number of syncs of a fragment from one whole publication of its values to the next.

        It is 1 unless the state is published encoded.
        """
        coded = self.fragments[0].job.coded
        return 1 if coded is None else coded.full_every

    def newest_done(self) -> list[int]:
        """Return for every fragment the newest sync whose state is complete by now.

        It is 0 for the initial state.
        """
        return newest_done(self.store.list("state/"), len(self.fragments))

    def recorded(self) -> set[int]:
        """The syncs of which a listing shows the record."""
        return set(filter(None, map(commit_sync, self.store.list("commits/"))))

    def made_of(self, sync: int, fragment: int) -> list[int]:
        """Return the syncs whose objects make a fragment's state after a sync, in order.

        See :func:`.._records._rules.made_of`.
        """
        every, rollbacks = self.whole_every, self.standing.rollbacks
        return made_of(sync, fragment, len(self.fragments), every, rollbacks)

    def create(self, key: str, parts: Callable[[], Iterable[Buffer]]) -> bool:
        """Create an object unless it exists, and count its bytes.

        Returns whether this call created it. Thread-safe.

        The memory behind the parts must not change until this returns: over a network they are sent
        without a copy.
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
        """The address of a key, for errors."""
        return f"{self.store.uri}/{key}"

    def bound(self, key: str) -> str:
        """A text that names run and key.

        The seed of an object's checksum is made of it, which binds the object to both.
        """
        return f"{self.run}/{key}"

    def shard(self, sync: int, fragment: int, number: int) -> Shard:
        """A shard of the state after a sync."""
        job, origin = self.fragments[fragment].job, self.run if sync else self.manifest.initial
        return published_shard(job, sync, number, origin, self.chunk_bytes)

    def file(self, progress: Progress, number: int, sync: int | None = None) -> tuple[str, Shard]:
        """Return the key and the content of a shard of a fragment's state.

        The state is that after ``sync``, or else after the sync that ``progress`` describes.
        """
        sync = progress.sync if sync is None else sync
        return self.key(sync, progress.index, number), self.shard(sync, progress.index, number)

    @property
    def notice_after(self) -> float:
        """Seconds of waiting for other replicas after which the log says so."""
        return NOTICE_SECONDS if self.fixed else self.settings.grace

    def read(self, key: str, parse: Callable[[bytes], T]) -> T | None:
        """A record, read again if it is not as it was written; None if there is none.

        Raises:
            CorruptedObjectError: It is damaged in the store.
        """

        def read() -> T | None:
            data = self.store.get(key)
            return None if data is None else parse(data)

        return read_again(self.timing, read)

    def read_file(
        self,
        key: str,
        use: Callable[[ObjectReader], T],
        opened: ObjectReader | None = None,
        most: int | None = None,
    ) -> T | None:
        """Return what ``use`` returns for the reader of an object; None if there is none.

        Args:
            key: The object's key.
            use: Called again, with another reader, if what it reads is not as it was written.
            opened: The object, if it is open already. The first attempt uses and closes it.
            most: How often ``use`` is called again; see :func:`.read_again`.
        """

        def read() -> T | None:
            nonlocal opened
            already_open, opened = opened, None
            return self.store.read(key, use, already_open)

        return read_again(self.timing, read, most)

    def again(self, read: Callable[[], T]) -> T:
        """Return what ``read`` returns; call it again if what it reads is damaged."""
        return read_again(self.timing, read)

    def watch(self, key: str, own: bytes, parse: Callable[[bytes], T]) -> T | None:
        """Make sure that an object is there which this incarnation has read or written.

        If it is damaged or gone, it is written again.

        Args:
            key: Its key.
            own: Its content, as this incarnation knows it.
            parse: Reads any other content.

        Returns:
            What ``parse`` returns for other content that is undamaged; otherwise None.
        """

        def read() -> tuple[T | None] | None:
            # The time of the last reading, not of the first: the pauses between them may be longer
            # than a grace.
            if key == MANIFEST:
                self.standing.checked = self.timing.clock()
            data = self.store.get(key)
            return None if data is None else (None if data == own else parse(data),)

        try:
            stored = self.again(read)
        except CorruptedObjectError as error:
            self.say.error(LOST, str(error).rstrip("."))
            self.store.put(key, lambda: [own])
            return None
        if stored is None:
            self.say.error(LOST, f"{self.origin(key)} is gone")
            stored = None if self.store.create(key, lambda: own) else self.again(read)
        return stored and stored[0]

    def log(self, sync: int) -> Commit | Rollback | None:
        """The record with this number in the log; None if there is none.

        Raises:
            CorruptedObjectError: It is damaged.
            RunExistsError: It belongs to another run.
        """
        key, fragments = commit_key(sync), len(self.fragments)
        origin = self.origin(key)
        record = self.read(key, lambda data: read_record(data, sync, origin, fragments))
        return record and of_run(record, self.run, origin)

    def done(self, sync: int, fragment: int) -> Done | None:
        """The record of a complete state; None if there is none.

        Raises:
            CorruptedObjectError: It is damaged.
            RunExistsError: It belongs to another run.
        """
        key = done_key(sync, fragment)
        record = self.read(key, lambda data: Done.from_json(data, sync, fragment, self.origin(key)))
        if record is None:
            return None
        of_run(record, self.run, self.origin(key))
        job = self.fragments[fragment].job
        record.check_shards(job.layout.shards, self.origin(key))
        if record.full != publishes_whole(job, sync):
            raise CorruptedObjectError(
                f"{self.origin(key)} is undamaged, but it says that the state is "
                f"{'whole' if record.full else 'not whole'}, which is not what follows from the "
                "run's full_state_every"
            )
        return record

    def does_not_follow(self, commit: Commit) -> CorruptedObjectError:
        """The error for a record that is not the next one in the log."""
        return CorruptedObjectError(
            f"{self.origin(commit_key(commit.sync))} is undamaged, but it does not follow the "
            "record before it that this replica has read: objects of two runs are mixed below this "
            "prefix, or records were deleted and written again"
        )
