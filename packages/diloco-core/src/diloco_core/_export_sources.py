"""Where the newest published state of a run lies: of elastic runs by their records, of strict ones by what is there."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ._elastic_records import MANIFEST, Done, Manifest, done_key, shard_key
from ._elastic_rules import newest_done
from ._errors import CorruptedObjectError, ObjectNotFoundError, RendezvousError
from ._fragment import initial_fingerprint
from ._store_sync import state_key
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
    """The published states of a run.

    Attributes:
        run_id: The launch it belongs to.
        fragments: For every fragment, what its files look like.
    """

    run_id: str
    fragments: Sequence[Mapping[str, Any]]

    def newest(self) -> list[int]:
        """For every fragment, the newest sync whose state is complete."""
        ...

    def files(self, index: int, sync: int) -> list[PublishedFile]:
        """The shards of a fragment's state after a sync."""
        ...

    def outer_steps(self, sync: int) -> int:
        """How many outer steps the run had taken after a sync."""
        ...


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
        record: dict[str, Any] = json.loads(data)
        strict = record.get("membership") == "strict"
    except (ValueError, AttributeError):
        raise CorruptedObjectError(f"{origin} is damaged: it is no JSON object") from None
    if not strict:
        return _ElasticSource(store, Manifest.from_json(data, origin))
    if not record.get("fragments"):
        raise RendezvousError(f"{store.uri} holds a run without a model, such as plain means: nothing can be exported")
    return _StrictSource(store, record)


class _ElasticSource:
    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.run_id = manifest.run_id
        self.fragments = manifest.fragments
        self._store = store
        self._manifest = manifest

    def newest(self) -> list[int]:
        return newest_done(self._store.list("state/"), len(self.fragments))

    def files(self, index: int, sync: int) -> list[PublishedFile]:
        key, initial = done_key(sync, index), self._manifest.initial
        origin = f"{self._store.uri}/{key}"
        done = Done.from_json(self._store.get(key), sync, index, origin) if sync else self._manifest.done(index)
        where = self.fragments[index]["fingerprint"], sync or initial, "values"
        return [
            PublishedFile(shard_key(sync, index, number, initial), seed(*where, number), checksum)
            for number, checksum in enumerate(done.sums)
        ]

    def outer_steps(self, sync: int) -> int:
        return sync


class _StrictSource:
    """A strict run has no records of what is complete: a state is, when all of its shards are there."""

    def __init__(self, store: Store, manifest: Mapping[str, Any]) -> None:
        self.run_id = manifest["run_id"]
        self.fragments = manifest["fragments"]
        self._before = int(manifest["settings"]["committed"])
        self._store = store

    def newest(self) -> list[int]:
        there = Counter(int(key.split("/")[1]) for key in self._store.list("state/"))
        found: dict[int, int] = {}
        for sync in sorted(there):
            index = self._fragment_of(sync)
            if there[sync] == self.fragments[index]["shards"]:
                found[index] = sync
        if len(found) < len(self.fragments):
            raise RendezvousError(f"the run at {self._store.uri} has not published a whole model yet: try again later")
        return [found[index] for index in range(len(self.fragments))]

    def files(self, index: int, sync: int) -> list[PublishedFile]:
        table = self.fragments[index]
        own = table["fingerprint"]
        fingerprint = own if sync >= len(self.fragments) else initial_fingerprint(own)
        return [
            PublishedFile(state_key(sync, number), seed(fingerprint, sync, "values", number))
            for number in range(table["shards"])
        ]

    def outer_steps(self, sync: int) -> int:
        # The first sync of every fragment is that of the initial values.
        return self._before + max(0, sync + 1 - len(self.fragments))

    def _fragment_of(self, sync: int) -> int:
        count = len(self.fragments)
        return sync if sync < count else (self._before + sync) % count
