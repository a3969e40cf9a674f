"""Where the published states of a run lie: of elastic runs by their records, of strict ones by what is there."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ._elastic_records import MANIFEST, Done, Manifest, done_key, shard_key
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
    """The published states of a run. A state is named by how many outer steps the run had taken.

    Attributes:
        run_id: The launch it belongs to.
        fragments: For every fragment, what its files look like.
        unsynced: The same of what is not synced; empty where there is nothing.
        first: Outer steps that had been taken when the run began.
    """

    run_id: str
    fragments: Sequence[Mapping[str, Any]]
    unsynced: Mapping[str, Any]
    first: int

    def complete(self) -> list[set[int]]:
        """For every fragment, after which outer steps its state is completely published."""
        ...

    def files(self, index: int, step: int) -> list[PublishedFile]:
        """The shards of a fragment's state after an outer step."""
        ...


def states(source: Source, complete: Sequence[set[int]]) -> list[int]:
    """After which outer steps the whole model can be had, the newest first."""
    steps = sorted(set().union(*complete), reverse=True)
    return [
        step
        for step in steps
        if all(parts[i] in there for parts in [state(source, step)] for i, there in enumerate(complete))
    ]


def state(source: Source, step: int) -> list[int]:
    """The state after an outer step: for every fragment, the last step that was its own."""
    count = len(source.fragments)
    return [max(source.first, step - (step - 1 - index) % count) for index in range(count)]


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
        self.run_id = manifest.run_id
        self.fragments = manifest.fragments
        self.unsynced = manifest.unsynced
        self._store = store
        self._manifest = manifest

    def complete(self) -> list[set[int]]:
        found = done_states(self._store.list("state/"), len(self.fragments))
        initial = self._store.list(f"initial/{self._manifest.initial}/")
        for index, syncs in enumerate(found):
            if all(file.key in initial for file in self.files(index, 0)):
                syncs.add(0)
        return found

    def files(self, index: int, step: int) -> list[PublishedFile]:
        key, initial = done_key(step, index), self._manifest.initial
        origin = f"{self._store.uri}/{key}"
        done = Done.from_json(self._store.get(key), step, index, origin) if step else self._manifest.done(index)
        where = self.fragments[index]["fingerprint"], step or initial, "values"
        return [
            PublishedFile(shard_key(step, index, number, initial), seed(*where, number), checksum)
            for number, checksum in enumerate(done.sums)
        ]


class _StrictSource:
    """A strict run has no records of what is complete: a state is, when all of its shards are there."""

    def __init__(self, store: Store, manifest: Mapping[str, Any]) -> None:
        self.run_id = manifest["run_id"]
        self.fragments = manifest["fragments"]
        self.unsynced = manifest.get("unsynced", {})
        self.first = int(manifest["settings"]["committed"])
        self._store = store

    def complete(self) -> list[set[int]]:
        count = len(self.fragments)
        there = Counter(int(key.split("/")[1]) for key in self._store.list("state/"))
        found: list[set[int]] = [set() for _ in range(count)]
        for sync, shards in there.items():
            # The first sync of every fragment is that of the initial values.
            step = self.first + max(0, sync + 1 - count)
            index = sync if sync < count else (step - 1) % count
            if shards == self.fragments[index]["shards"]:
                found[index].add(step)
        return found

    def files(self, index: int, step: int) -> list[PublishedFile]:
        table = self.fragments[index]
        own = table["fingerprint"]
        sync = index if step == self.first else step - self.first + len(self.fragments) - 1
        fingerprint = initial_fingerprint(own) if step == self.first else own
        return [
            PublishedFile(state_key(sync, number), seed(fingerprint, sync, "values", number))
            for number in range(table["shards"])
        ]
