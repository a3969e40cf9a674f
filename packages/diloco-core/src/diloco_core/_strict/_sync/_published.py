"""The shards that a replica publishes in a sync, and writes again where others find them damaged."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError
from ..._store._copies import copy_key

if TYPE_CHECKING:
    from ..._exchange._traffic import Traffic
    from ..._store._patient import Patient
    from ..._wire._published import Sums
    from .._records._repairs import Repairs
    from ._objects import SyncObjects

_log = logging.getLogger("diloco_core")


class OwnShards:
    """The shards of one sync that this replica has published.

    Args:
        store: The run's prefix.
        objects: The objects of the sync.
        repairs: The requests to write shards again.
        traffic: Counts what is written.
    """

    def __init__(
        self, store: Patient, objects: SyncObjects, repairs: Repairs, traffic: Traffic
    ) -> None:
        self._store = store
        self._objects = objects
        self._repairs = repairs
        self._traffic = traffic
        self._sums: dict[int, Sums] = {}

    def publish(self, shard: int) -> None:
        """Store a shard after its update."""

        def remember(sums: Sums) -> None:
            self._sums[shard] = sums

        published = self._objects.shard(shard)
        self._traffic.sent += self._store.put(
            self._objects.state_key(shard),
            lambda: published.parts(self._objects.shard_metadata(), remember),
        )

    def copy(self, shard: int) -> None:
        """Store a copy of a shard that has been published, whose values have not changed since."""
        published = self._objects.shard(shard)
        self._traffic.sent += self._store.put(
            copy_key(self._objects.state_key(shard)),
            lambda: published.parts(self._objects.shard_metadata()),
        )

    def repair(self) -> None:
        """Write those shards of this replica again that others have found damaged.

        Raises:
            CorruptedObjectError: A shard cannot be written again, because its values have changed since.
        """
        for shard in self._repairs.wanted():
            if shard not in self._sums:
                continue
            origin = f"{self._store.uri}/{self._objects.state_key(shard)}"
            sums = self._objects.shard(shard).sums(self._objects.shard_metadata())
            if sums != self._sums[shard]:
                raise CorruptedObjectError(
                    f"{origin} is damaged and cannot be written again, because the tensors that it was made from have changed "
                    "since. The replicas no longer hold the same values: start again from a checkpoint, on another prefix."
                )
            _log.error(
                "%s is damaged in the store and is written again with the same content.", origin
            )
            self.publish(shard)
            self._repairs.done(shard)
