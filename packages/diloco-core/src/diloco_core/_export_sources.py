"""Where the published states of a run lie: of elastic runs by their records, of strict ones by what is there."""

from __future__ import annotations

import json
import logging
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ._elastic_keys import MANIFEST, Delta, Hint, commit_key, commit_sync, done_key, shard_key
from ._elastic_life import published_seed
from ._elastic_records import Commit, Done, Manifest, Rollback, of_run, read_record
from ._elastic_rules import done_states
from ._elastic_rules import states as published_states
from ._errors import CorruptedObjectError, FormatError, ObjectNotFoundError, RendezvousError, RunExistsError
from ._fragment_initial import initial_fingerprint
from ._store_sync import state_key
from ._strict_records import committed_sync, note_key, noted_ranks, read_manifest, read_note
from ._unsynced import unsynced_key, unsynced_seed
from ._wire import fingerprint, seed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ._store_api import Store

T = TypeVar("T", bound="Commit | Rollback | Done")

_log = logging.getLogger("diloco_core")

_NO_MANIFEST = (
    "It says what the other objects are, and nothing can be exported without it. Put a copy of it back if you have one. In an "
    "elastic run, a replica that is still running puts it back: try again later."
)
_SHARD = re.compile(r"state/(\d{8})/\d{5}\.([0-9a-f]{16})\.safetensors", re.ASCII)


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
    """

    run_id: str
    fragments: Sequence[Mapping[str, Any]]
    unsynced: Mapping[str, Any]
    first: int
    rollbacks: Sequence[Rollback]

    def complete(self) -> list[set[int]]:
        """For every fragment, after which syncs its state is completely published, and was not given up."""
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
    return [key for index, own in enumerate(state(source, number)) for key in source.missing(index, own)]


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
        own = [last if last > before[-1].sync else kept for last, kept in zip(own, before[-1].states, strict=True)]
    return own


def outer_steps(source: Source, number: int) -> int:
    """How many outer steps the model had taken then: rollbacks and what they gave up are in the log, and not in the model."""
    before = [rollback for rollback in source.rollbacks if rollback.sync <= number]
    return number - len({sync for rollback in before for sync in (rollback.sync, *rollback.given_up)})


def find_source(store: Store) -> Source:
    """The run that a store holds.

    Raises:
        RendezvousError: There is none, or one without a model.
    """
    origin = f"{store.uri}/{MANIFEST}"
    try:
        data = store.get(MANIFEST)
    except ObjectNotFoundError:
        # Whoever commits or publishes has seen a manifest.
        if store.list("commits/") or store.list("state/"):
            raise CorruptedObjectError(
                f"{origin} is gone, and other objects of a run are there. {_NO_MANIFEST}"
            ) from None
        raise RendezvousError(f"{store.uri} holds no run: there is no {MANIFEST}") from None
    except CorruptedObjectError as error:
        raise CorruptedObjectError(f"{sentence(error)} {_NO_MANIFEST}") from error
    try:
        return _source(store, data, origin)
    except CorruptedObjectError as error:
        raise CorruptedObjectError(f"{sentence(error)} {_NO_MANIFEST}") from error


def sentence(error: Exception) -> str:
    """What an error says, so that more can be said after it."""
    text = str(error)
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _source(store: Store, data: bytes, origin: str) -> Source:
    try:
        record: Mapping[str, Any] = json.loads(data)
        strict = record.get("membership") == "strict"
    except (ValueError, AttributeError, RecursionError):
        raise CorruptedObjectError(f"{origin} is damaged: it is no JSON object") from None
    if not strict:
        return _ElasticSource(store, Manifest.from_json(data, origin))
    record = read_manifest(data, origin)
    if not record.get("fragments"):
        raise RendezvousError(f"{store.uri} holds a run without a model, such as plain means: nothing can be exported")
    return _StrictSource(store, record)


def unsynced_files(source: Source) -> list[PublishedFile]:
    """The objects of what is not synced."""
    table = source.unsynced
    return [
        PublishedFile(unsynced_key(table["folder"], number), unsynced_seed(table["folder"], number), int(checksum, 16))
        for number, checksum in enumerate(table.get("sums", ()))
    ]


def without_unsynced(source: Source) -> str:
    """What can be done where what is not synced cannot be read."""
    names = [str(entry["name"]) for entry in source.unsynced.get("tensors", ())]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    who = (
        "A replica of the run whose model holds the same values writes it again: one that is running looks every few syncs "
        "whether it is there, and when it leaves. Otherwise start all ranks of the run again on this prefix (if it is finished, "
        "they leave at once): they also read it."
        if isinstance(source, _ElasticSource)
        else "While the run goes on: rank 0 writes it again when it leaves, if it is gone or has another size."
    )
    return (
        f"It belongs to what the run does not sync: {', '.join(map(repr, names[:3]))}{more}, as they were when it began. {who} "
        "If nobody can write it again, synced_only=True writes all other tensors; take these from the model that the run began "
        "with."
    )


class _ElasticSource:
    first = 0

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.rollbacks: Sequence[Rollback] = []
        self.run_id = manifest.run_id
        self.fragments = manifest.fragments
        self.unsynced = manifest.unsynced
        self._store = store
        self._manifest = manifest
        self._run = manifest.run()

    def complete(self) -> list[set[int]]:
        self.rollbacks = self._read_rollbacks()
        found = done_states(self._store.list("state/"), len(self.fragments), self.rollbacks)
        initial = self._store.list(f"initial/{self._manifest.initial}/")
        for index, syncs in enumerate(found):
            if all(file.key in initial for file in self.files(index, 0)):
                syncs.add(0)
        return found

    def files(self, index: int, sync: int) -> list[PublishedFile]:
        initial = self._manifest.initial
        done = self._done(sync, index) if sync else self._manifest.done(index)
        of = self._run if sync else initial
        where = self.fragments[index]["fingerprint"], of, sync, "values"
        return [
            PublishedFile(shard_key(sync, index, number, initial), published_seed(*where, number), checksum)
            for number, checksum in enumerate(done.sums)
        ]

    def expected(self) -> list[int]:
        listing = self._store.list("state/")
        traces = {sync for sync, _ in published_states(listing)}
        committed = {sync for sync in map(commit_sync, self._store.list("commits/")) if sync}
        deltas = self._store.list("deltas/")
        # Who contributes to a sync, or joins in it, has the state before it.
        committed |= {delta.sync - 1 for delta in map(Delta.parse, deltas) if delta}
        hints = [hint for hint in map(Hint.parse, deltas) if hint]
        committed |= {hint.sync - 1 for hint in hints if hint.event == "join"}
        left: dict[tuple[int, int], int] = {}
        for hint in hints:
            if hint.event == "leave":  # a life that fails names two syncs: it stands before the first
                life = hint.rank, hint.epoch
                left[life] = min(hint.sync - 1, left.get(life, hint.sync))
        last = max({0}.union(traces, committed, left.values()))
        ended = last in left.values()
        numbers = set(range(last + 1))
        if self._manifest.topology == "gather":
            # Most syncs are not published, and others are called complete two rounds later. Who leaves makes up for it.
            begun = {0, *traces}
            settled = last if ended else last - 2 * len(self.fragments) - 1
            numbers = {number for number in begun if number <= settled and begun.issuperset(state(self, number))}
            numbers |= {last} if ended else set()
        obsolete = {sync for rollback in self.rollbacks for sync in (rollback.sync, *rollback.given_up)}
        return sorted(numbers - obsolete, reverse=True)

    def missing(self, index: int, sync: int) -> list[str]:
        initial = self._manifest.initial
        shards = range(self.fragments[index]["shards"])
        keys = [shard_key(sync, index, number, initial) for number in shards]
        keys += [done_key(sync, index)] if sync else []
        listing = self._store.list(f"state/{sync:08}/" if sync else f"initial/{initial}/")
        return [key for key in keys if key not in listing]

    def _read_rollbacks(self) -> list[Rollback]:
        """All that can be read, the oldest first. Every record of the log names the newest rollback before it."""
        found: list[Rollback] = []
        following: int | None = (
            None  # which record is to be read next; None: the newest before `limit` that can be read
        )
        limit = sys.maxsize
        listed = sorted(filter(None, map(commit_sync, self._store.list("commits/"))), reverse=True)
        while following != 0:
            sync = following or next((number for number in listed if number < limit), 0)
            if not sync:
                break
            limit = sync
            try:
                record = self._record(sync)
            except (CorruptedObjectError, ObjectNotFoundError) as error:
                _log.warning("%s. What it says is left out of account: the record before it is read instead.", error)
                following = None
                continue
            if isinstance(record, Rollback):
                found.append(record)
            following = record.rollback
        return found[::-1]

    def _record(self, sync: int) -> Commit | Rollback:
        key, fragment = commit_key(sync), (sync - 1) % len(self.fragments)
        origin = f"{self._store.uri}/{key}"
        try:
            return self._own(read_record(self._store.get(key), sync, origin), origin)
        except (CorruptedObjectError, ObjectNotFoundError):
            if done_key(sync, fragment) not in self._store.list(f"state/{sync:08}/"):
                raise
            commit = self._done(sync, fragment).commit
            if commit is None:
                raise
            return commit

    def _done(self, sync: int, index: int) -> Done:
        key = done_key(sync, index)
        origin = f"{self._store.uri}/{key}"
        return self._own(Done.from_json(self._store.get(key), sync, index, origin), origin)

    def _own(self, record: T, origin: str) -> T:
        """A record of this run. Here, one of another run is like a damaged one: there may be an older state that is whole."""
        try:
            return of_run(record, self._run, origin)
        except RunExistsError as error:
            raise CorruptedObjectError(str(error)) from error


class _StrictSource:
    """A strict run has no records of what is complete: a state is, when all of its shards are there."""

    def __init__(self, store: Store, manifest: Mapping[str, Any]) -> None:
        self.rollbacks: Sequence[Rollback] = []
        self.run_id = manifest["run_id"]
        self._run = manifest["run"]
        self.fragments = manifest["fragments"]
        self.unsynced = manifest.get("unsynced", {})
        self.first = int(manifest["settings"]["committed"])
        self._store = store

    def complete(self) -> list[set[int]]:
        count = len(self.fragments)
        listing = self._store.list("state/")
        found: list[set[int]] = [set() for _ in range(count)]
        for sync in self._published(listing):
            step = self._step(sync)
            index = sync if sync < count else (step - 1) % count
            if all(state_key(self._run, sync, number) in listing for number in range(self.fragments[index]["shards"])):
                found[index].add(step)
        return found

    def files(self, index: int, sync: int) -> list[PublishedFile]:
        table = self.fragments[index]
        own = table["fingerprint"]
        # In the store, the syncs of the initial values count too.
        stored = index if sync == self.first else sync - self.first + len(self.fragments) - 1
        identity = fingerprint(self._run, initial_fingerprint(own) if sync == self.first else own)
        return [
            PublishedFile(state_key(self._run, stored, number), seed(identity, stored, "values", number))
            for number in range(table["shards"])
        ]

    def expected(self) -> list[int]:
        syncs = self._published(self._store.list("state/"))
        syncs |= {sync for sync in map(committed_sync, self._store.list("commits/")) if sync is not None}
        # A replica's last note says how many syncs it has finished.
        syncs |= {finished - 1 for finished in map(self._finished, noted_ranks(self._store.list("notes/"))) if finished}
        return list(range(self._step(max(syncs)), self.first, -1)) if syncs else []

    def missing(self, index: int, sync: int) -> list[str]:
        keys = [file.key for file in self.files(index, sync)]
        listing = self._store.list("state/")
        return [key for key in keys if key not in listing]

    def _step(self, sync: int) -> int:
        """How many outer steps had been taken after a sync: the first of every fragment is that of the initial values."""
        return self.first + max(0, sync + 1 - len(self.fragments))

    def _finished(self, rank: int) -> int:
        key = note_key(rank)
        try:
            return read_note(self._store.get(key), rank, f"{self._store.uri}/{key}")[0].progress.number
        except (CorruptedObjectError, FormatError, ObjectNotFoundError):
            return 0  # the log is more certain anyway

    def _published(self, listing: Mapping[str, int]) -> set[int]:
        """Of which syncs something is published."""
        found = filter(None, map(_SHARD.fullmatch, listing))
        return {int(match[1]) for match in found if match[2] == self._run[:16]}
