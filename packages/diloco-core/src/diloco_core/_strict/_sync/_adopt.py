"""The shards of the other owners, adopted as they are published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError
from ..._store._ahead import open_ahead
from ..._store._reread import read_again

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..._arithmetic._layout import Layout
    from ..._exchange._traffic import Traffic
    from ..._store._api import ObjectReader
    from .._participant import Participant
    from .._records._repairs import Repairs
    from ._objects import SyncObjects


class Adoption:
    """What a replica still has to adopt in one sync.

    Args:
        participant: What stays the same from sync to sync.
        layout: The layout of what is synced.
        objects: The objects of the sync.
        repairs: The requests to write shards again.
        traffic: Counts what is read.
    """

    def __init__(
        self,
        participant: Participant,
        layout: Layout,
        objects: SyncObjects,
        repairs: Repairs,
        traffic: Traffic,
    ) -> None:
        self._participant = participant
        self._objects = objects
        self._repairs = repairs
        self._traffic = traffic
        owned = participant.owned(layout)
        self.pending = [shard for shard in range(layout.shards) if shard not in owned]

    def owners(self) -> list[int]:
        """The ranks whose shards are still to come."""
        return sorted({self._participant.owner(shard) for shard in self.pending})

    def adopt_published(self) -> bool:
        """Adopt those shards that are published by now. Returns whether there were any."""
        store = self._participant.store
        listing = store.list(self._objects.states)
        keys = {self._objects.state_key(shard): shard for shard in self.pending}
        ready = {
            key: listing[key]
            for key in keys
            if key in listing and not self._repairs.pending(keys[key])
        }

        def announce(key: str, reader: ObjectReader) -> None:
            self._objects.shard(keys[key]).announce(reader, f"{store.uri}/{key}")

        before = len(self.pending)
        with open_ahead(store.store, ready, announce) as readers:
            for key, reader in zip(ready, readers, strict=True):
                shard = keys[key]
                try:
                    self._adopt(key, shard, reader)
                except CorruptedObjectError as error:
                    self._repairs.ask(shard, self._participant.owner(shard), error)
                    continue
                self._traffic.received += self._objects.shard(shard).adopted_bytes
                self.pending.remove(shard)
        return len(self.pending) < before

    def check_repairs(self) -> None:
        """Give up on damaged shards whose owners have ended.

        Raises:
            CorruptedObjectError: The owner of a shard that this replica found damaged has left or failed.
        """
        for shard in self.pending:
            ending = self._participant.liveness.ending(self._participant.owner(shard))
            self._repairs.check(shard, ending)

    def _adopt(self, key: str, shard: int, opened: ObjectReader | None) -> None:
        def adopt(reader: ObjectReader, origin: str) -> None:
            self._objects.shard(shard).adopt(reader, origin, self._participant.scratch)

        gone = "was published and has vanished: something deletes objects there."
        read_shard(self._participant, key, opened, adopt, gone)


def read_shard(
    participant: Participant,
    key: str,
    opened: ObjectReader | None,
    use: Callable[[ObjectReader, str], object],
    gone: str,
) -> None:
    """Read a published shard, and read it again if it is damaged.

    Args:
        participant: This replica.
        key: The key of the shard.
        opened: Its reader if it is open already. It is used first, and closed.
        use: Given a reader, and what errors call the object; may be called again. Raises CorruptedObjectError for damage.
        gone: What errors say of the object if it is not there.

    Raises:
        CorruptedObjectError: The shard is damaged, or it is gone.
    """
    store = participant.store
    origin = f"{store.uri}/{key}"

    def read() -> None:
        nonlocal opened  # used by the first attempt only
        reader, opened = opened, None

        def act(reader: ObjectReader) -> bool:
            use(reader, origin)
            return True

        if store.read(key, act, reader) is None:
            raise CorruptedObjectError(f"{origin} {gone}")

    read_again(participant.timing, read)
