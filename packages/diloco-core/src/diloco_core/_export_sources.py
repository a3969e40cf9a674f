"""Where the published states of a run lie: of elastic runs by their records, of strict ones by what is there."""

from __future__ import annotations

import json
import logging
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ._elastic_records import (
    MANIFEST,
    Commit,
    Done,
    Manifest,
    Rollback,
    commit_key,
    commit_sync,
    done_key,
    read_record,
    shard_key,
)
from ._elastic_rules import done_states
from ._errors import CorruptedObjectError, ObjectNotFoundError, RendezvousError
from ._fragment import initial_fingerprint
from ._store_sync import state_key
from ._strict_records import read_manifest
from ._unsynced import unsynced_key, unsynced_seed
from ._wire import seed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ._store import Store

_log = logging.getLogger("diloco_core")

_SHARD = re.compile(r"state/(\d{8})/\d{5}\.safetensors", re.ASCII)


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
    try:
        data = store.get(MANIFEST)
    except ObjectNotFoundError:
        raise RendezvousError(f"{store.uri} holds no run: there is no {MANIFEST}") from None
    origin = f"{store.uri}/{MANIFEST}"
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


class _ElasticSource:
    first = 0

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.rollbacks: Sequence[Rollback] = []
        self.run_id = manifest.run_id
        self.fragments = manifest.fragments
        self.unsynced = manifest.unsynced
        self._store = store
        self._manifest = manifest

    def complete(self) -> list[set[int]]:
        self.rollbacks = self._read_rollbacks()
        found = done_states(self._store.list("state/"), len(self.fragments), self.rollbacks)
        initial = self._store.list(f"initial/{self._manifest.initial}/")
        for index, syncs in enumerate(found):
            if all(file.key in initial for file in self.files(index, 0)):
                syncs.add(0)
        return found

    def files(self, index: int, sync: int) -> list[PublishedFile]:
        key, initial = done_key(sync, index), self._manifest.initial
        origin = f"{self._store.uri}/{key}"
        done = Done.from_json(self._store.get(key), sync, index, origin) if sync else self._manifest.done(index)
        where = self.fragments[index]["fingerprint"], sync or initial, "values"
        return [
            PublishedFile(shard_key(sync, index, number, initial), seed(*where, number), checksum)
            for number, checksum in enumerate(done.sums)
        ]

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
        try:
            return read_record(self._store.get(key), sync, f"{self._store.uri}/{key}")
        except (CorruptedObjectError, ObjectNotFoundError):
            done = done_key(sync, fragment)
            if done not in self._store.list(f"state/{sync:08}/"):
                raise
            commit = Done.from_json(self._store.get(done), sync, fragment, f"{self._store.uri}/{done}").commit
            if commit is None:
                raise
            return commit


class _StrictSource:
    """A strict run has no records of what is complete: a state is, when all of its shards are there."""

    def __init__(self, store: Store, manifest: Mapping[str, Any]) -> None:
        self.rollbacks: Sequence[Rollback] = []
        self.run_id = manifest["run_id"]
        self.fragments = manifest["fragments"]
        self.unsynced = manifest.get("unsynced", {})
        self.first = int(manifest["settings"]["committed"])
        self._store = store

    def complete(self) -> list[set[int]]:
        count = len(self.fragments)
        listing = self._store.list("state/")
        found: list[set[int]] = [set() for _ in range(count)]
        for sync in {int(match[1]) for match in map(_SHARD.fullmatch, listing) if match is not None}:
            # The first sync of every fragment is that of the initial values.
            step = self.first + max(0, sync + 1 - count)
            index = sync if sync < count else (step - 1) % count
            if all(state_key(sync, number) in listing for number in range(self.fragments[index]["shards"])):
                found[index].add(step)
        return found

    def files(self, index: int, sync: int) -> list[PublishedFile]:
        table = self.fragments[index]
        own = table["fingerprint"]
        # In the store, the syncs of the initial values count too.
        stored = index if sync == self.first else sync - self.first + len(self.fragments) - 1
        fingerprint = initial_fingerprint(own) if sync == self.first else own
        return [
            PublishedFile(state_key(stored, number), seed(fingerprint, stored, "values", number))
            for number in range(table["shards"])
        ]
