"""What a model does not sync is stored once, when its run begins; whoever holds the same values writes it again where it is lost.

The run's manifest says what the objects hold, so a replica can tell whether its own tensors are the same.
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
    """Sees to it that the objects with what is not synced are there. Not thread-safe.

    Args:
        store: The run's prefix.
        timing: Its ``sleep`` is used.
        rank: This replica, for the log.
        table: What the run's manifest says about the objects; empty where there are none.
        own: The same tensors of this replica's model.
    """

    def __init__(
        self,
        store: Patient,
        timing: Timing,
        rank: int,
        table: Mapping[str, Any],
        own: Unsynced | None,
    ) -> None:
        self._store = store
        self._timing = timing
        self._rank = rank
        self._folder = str(table.get("folder", ""))
        self._sums = [int(checksum, 16) for checksum in table.get("sums", ())]
        self._own = own if own is not None and own.has_the_layout_of(table) else None
        self._told: set[int] = set()

    def look(self, part: int = 0, parts: int = 1, *, whole: bool = False) -> None:
        """Write again what is gone or has another size; with ``whole``, what is damaged too, which reads all of it.

        One listing, where there is anything to look at.

        Args:
            part: The objects ``part``, ``part + parts``, … are looked at.
            parts: 1 for all of them.
            whole: Read them.
        """
        wanted = range(part, len(self._sums), parts)
        if not wanted:
            return
        listing = self._store.list(f"{self._folder}/")
        for number in wanted:
            damage = self._damage(number, listing)
            if damage is None and whole:
                damage = self._rot(number)
            if damage is not None:
                self._write_again(number, damage)

    def _damage(self, number: int, listing: Mapping[str, int]) -> str | None:
        """What a listing shows to be wrong with an object; None where nothing."""
        key = unsynced_key(self._folder, number)
        if key not in listing:
            return f"{self._origin(key)} is gone"
        if self._own is not None and listing[key] != self._own.object_bytes(number):
            return f"{self._origin(key)} has {listing[key]} bytes, not {self._own.object_bytes(number)}"
        return None

    def _rot(self, number: int) -> str | None:
        """What reading an object shows to be wrong with it."""
        if self._own is None:
            return None
        key, own = unsynced_key(self._folder, number), self._own
        wanted = Sums(self._sums[number], own.header_checksum(number))

        def use(reader: ObjectReader) -> bool:
            header = bytearray(len(own.header(number)))
            if reader.size < len(header):
                raise CorruptedObjectError(f"{self._origin(key)} is truncated")
            reader.read_into(0, memoryview(header))
            values = ValuesReader(
                reader, own.layout, own.section(self._folder, number), self._origin(key)
            )
            own.read_over(number, values.read)
            if bytes(header) != own.header(number) or values.verify() != wanted:
                raise CorruptedObjectError(f"{self._origin(key)} is not what was written")
            return True

        try:
            # The others may be waiting. Where this accuses an object wrongly, the same is written once more.
            if read_again(self._timing, partial(self._store.read, key, use), most=2):
                return None
        except CorruptedObjectError as error:
            return str(error).rstrip(".")
        return f"{self._origin(key)} is gone"

    def _write_again(self, number: int, damage: str) -> None:
        key = unsynced_key(self._folder, number)
        if self._own is not None and self._own.checksum(self._folder, number) == self._sums[number]:
            _log.error(
                "rank %d: %s. It is written again with the same content. Something outside the run deletes or "
                "changes its objects.",
                self._rank,
                damage,
            )
            self._store.put(key, partial(self._own.parts, self._folder, number))
        elif number not in self._told:
            self._told.add(number)
            _log.error(
                "rank %d: %s. It holds tensors that are not synced (frozen parameters, buffers that are left alone). This "
                "replica cannot write it again, because its model holds other values than at the start of the run. Unless "
                "another replica can, export() can only write the synced tensors (synced_only=True).",
                self._rank,
                damage,
            )

    def _origin(self, key: str) -> str:
        return f"{self._store.uri}/{key}"
