"""Writing the objects with tensors that are not synced again when they are lost or damaged.

They are stored once, when the run begins. The run's manifest has their checksums, so a replica can find out whether its own
tensors hold the same values, and then write them again.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from .._errors import CorruptedObjectError
from .._store._reread import read_again
from .._wire._published import Sums, ValuesReader
from ._unsynced import unsynced_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .._store._api import ObjectReader
    from .._store._patient import Patient
    from .._timing import Timing
    from ._unsynced import Unsynced

_log = logging.getLogger("diloco_core")


class UnsyncedWatch:
    """Checks that the objects with the tensors that are not synced are there and whole. Not thread-safe.

    Args:
        store: The run's prefix.
        timing: Its ``sleep`` is used before an object is read again.
        rank: The rank of this replica, for the log.
        table: The table in the run's manifest that describes the objects; empty if there are none.
        own_tensors: The same tensors of this replica's model.
    """

    def __init__(
        self,
        store: Patient,
        timing: Timing,
        rank: int,
        table: Mapping[str, Any],
        own_tensors: Unsynced | None,
    ) -> None:
        self._store = store
        self._timing = timing
        self._rank = rank
        self._folder = str(table.get("folder", ""))
        self._sums = [int(checksum, 16) for checksum in table.get("sums", ())]
        self._own_tensors = (
            own_tensors
            if own_tensors is not None and own_tensors.has_the_layout_of(table)
            else None
        )
        self._reported: set[int] = set()

    def look(self, part: int = 0, parts: int = 1, *, whole: bool = False) -> None:
        """Check objects, and write those again that are gone or have a wrong size; with ``whole``, also damaged ones.

        Takes one listing if there is anything to check.

        Args:
            part: The objects ``part``, ``part + parts``, … are checked.
            parts: 1 for all of them.
            whole: Read the objects, which also shows damage inside them.
        """
        numbers = range(part, len(self._sums), parts)
        if not numbers:
            return
        listing = self._store.list(f"{self._folder}/")
        for number in numbers:
            damage = self._damage_in_listing(number, listing)
            if damage is None and whole:
                damage = self._damage_inside(number)
            if damage is not None:
                self._write_again(number, damage)

    def _damage_in_listing(self, number: int, listing: Mapping[str, int]) -> str | None:
        """The damage to an object that its listing shows; None if it shows none."""
        key = unsynced_key(self._folder, number)
        if key not in listing:
            return f"{self._origin(key)} is gone"
        if self._own_tensors is not None and listing[key] != self._own_tensors.object_bytes(number):
            return f"{self._origin(key)} has {listing[key]} bytes, not {self._own_tensors.object_bytes(number)}"
        return None

    def _damage_inside(self, number: int) -> str | None:
        """The damage to an object that reading it shows; None if it is whole, or cannot be compared."""
        if self._own_tensors is None:
            return None
        key, own_tensors = unsynced_key(self._folder, number), self._own_tensors
        expected = Sums(self._sums[number], own_tensors.header_checksum(number))

        def use(reader: ObjectReader) -> bool:
            header = bytearray(len(own_tensors.header(number)))
            if reader.size < len(header):
                raise CorruptedObjectError(f"{self._origin(key)} is truncated")
            reader.read_into(0, memoryview(header))
            values = ValuesReader(
                reader,
                own_tensors.layout,
                own_tensors.section(self._folder, number),
                self._origin(key),
            )
            own_tensors.read_over(number, values.read)
            if bytes(header) != own_tensors.header(number) or values.verify() != expected:
                raise CorruptedObjectError(f"{self._origin(key)} is damaged")
            return True

        try:
            # Only two further readings, since the other replicas may be waiting. If the object is not damaged after all, the
            # same bytes are just written once more.
            if read_again(self._timing, partial(self._store.read, key, use), most=2):
                return None
        except CorruptedObjectError as error:
            return str(error).rstrip(".")
        return f"{self._origin(key)} is gone"

    def _write_again(self, number: int, damage: str) -> None:
        key = unsynced_key(self._folder, number)
        if (
            self._own_tensors is not None
            and self._own_tensors.checksum(self._folder, number) == self._sums[number]
        ):
            _log.error(
                "rank %d: %s. It is written again with the same content. Something outside the run deletes or "
                "changes its objects.",
                self._rank,
                damage,
            )
            self._store.put(key, partial(self._own_tensors.parts, self._folder, number))
        elif number not in self._reported:
            self._reported.add(number)
            _log.error(
                "rank %d: %s. It holds tensors that are not synced (frozen parameters, buffers under buffers='none'). This "
                "replica cannot write it again, because its model holds other values than at the start of the run. Unless "
                "another replica can write it, export() can only write the synced tensors (synced_only=True).",
                self._rank,
                damage,
            )

    def _origin(self, key: str) -> str:
        return f"{self._store.uri}/{key}"
