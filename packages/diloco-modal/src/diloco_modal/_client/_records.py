"""The records of runs: one Dict for each run, whose entries are read as text."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from diloco_protocol.backend import Recent

from .._request._options import ModalOptions
from .._request._payload import record_name
from .._state._record import DamagedRecordError, checked, written
from ._connection import Connection
from ._errors import MissingError
from ._import import import_modal

PREFIX = "diloco-"
_KEPT_SECONDS = 60.0
_KEPT_RECORDS = 16
_KEPT_BYTES = 4 * 2**20
"""The most memory for kept entries of a record, which any program may have written."""


class Records(Connection):
    """The records of runs on Modal. Safe to share between threads."""

    def __init__(self, options: ModalOptions) -> None:
        super().__init__(options)
        self._records: Recent[str, tuple[float, Any]] = Recent(_KEPT_RECORDS)
        self._entries: Recent[str, tuple[float, Mapping[str, str]]] = Recent(_KEPT_RECORDS)

    def record(self, run_id: str, *, create: bool = False) -> Any:
        """Return the Dict of a run, found by its name.

        Raises:
            MissingError: There is no such Dict.
        """
        modal = import_modal()
        name = record_name(run_id)
        where, now = self._where, self._options.clock()

        def find() -> Any:
            return modal.Dict.from_name(name, create_if_missing=create, **where).hydrate.aio()

        record = self._ask(find, f"looking for the Dict {name!r}")
        self._records.keep(run_id, (now, record))
        return record

    def read(self, run_id: str) -> tuple[Any, Mapping[str, str]]:
        """Return the Dict of a run, and its entries.

        For a minute after its name was looked up, the Dict is asked for by its id. If it is gone
        then, or is not a run's any more, its name is looked up again. A Dict of the same name that
        was made meanwhile has another id.

        Raises:
            MissingError: There is no such Dict.
        """
        since, kept = self._records.get(run_id) or (0.0, None)
        # The clock may also have been set back.
        if kept is not None and 0 <= self._options.clock() - since < _KEPT_SECONDS:
            with contextlib.suppress(MissingError):
                entries = self.entries(kept)
                if "launch" in entries:
                    return kept, entries
        record = self.record(run_id)
        return record, self.entries(record)

    def put_once(self, record: Any, key: str, value: Mapping[str, Any]) -> bool:
        """Create an entry; return whether this call has created it."""
        put = lambda: record.put.aio(key, written(value), skip_if_exists=True)  # noqa: E731
        return bool(self._ask(put, f"writing {key} to the record"))

    async def hold(self, record: Any, key: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """Create an entry if there is none; return the value that it has then.

        Raises:
            DamagedRecordError: It does not have the form that this version writes.
        """
        put = record.put.aio(key, written(value), skip_if_exists=True)
        if await self._asked(put, f"writing {key} to the record"):
            return value
        look = self._wire.get_entry.aio(record, key)
        text = await self._asked(look, f"reading {key} from the record")
        return checked(key, text or "")

    def get(self, record: Any, key: str) -> Mapping[str, Any] | None:
        """Return an entry; None if there is no such entry.

        Raises:
            DamagedRecordError: It does not have the form that this version writes.
        """
        look = lambda: self._wire.get_entry.aio(record, key)  # noqa: E731
        text = self._ask(look, f"reading {key} from the record")
        return None if text is None else checked(key, text)

    def pop(self, record: Any, key: str) -> None:
        """Remove an entry, if it exists."""
        what = f"removing {key} from the record"
        self._ask(lambda: self._wire.remove_entry.aio(record, key), what)
        self._entries.forget(record.object_id)

    def pop_own(self, record: Any, key: str, value: Mapping[str, Any]) -> None:
        """Remove an entry if it was made here, as its id shows.

        A try whose answer was lost may have made it.
        """
        with contextlib.suppress(DamagedRecordError):
            if (self.get(record, key) or {}).get("id") == value["id"]:
                self.pop(record, key)

    def entries(self, record: Any) -> Mapping[str, str]:
        """Return all entries, as they were written.

        They are read only if their number has changed since the last time, or after a minute.

        Entries are created and never changed, and Modal's client takes as long to read a few of
        them as to ask for a result. Only a cancel that has failed removes its entry, and another
        entry may take its place; this is why they are read again after a minute.
        """
        key, now = record.object_id, self._options.clock()
        count = self._ask(record.len.aio, "looking at the record")
        if count == 0:
            return {}
        since, kept = self._entries.get(key) or (0.0, {})
        if len(kept) == count and 0 <= now - since < _KEPT_SECONDS:
            return kept
        read: dict[str, str] = self._ask(
            lambda: self._wire.get_entries.aio(record), "reading the record"
        )
        self.keep_entries(record, read, now)
        return read

    def keep_entries(self, record: Any, entries: Mapping[str, str], now: float) -> None:
        """Keep entries for :meth:`entries` to return, as long as the record has as many.

        Entries that are too large are not kept, and so are read each time.

        Args:
            record: The record of a run.
            entries: All its entries, as far as they are known here.
            now: When the first of them was read or written.
        """
        self._entries.forget(record.object_id)
        if sum(sys.getsizeof(text) for entry in entries.items() for text in entry) <= _KEPT_BYTES:
            self._entries.keep(record.object_id, (now, entries))

    def delete_record(self, run_id: str, record: Any) -> None:
        """Remove the Dict of a run, if it exists.

        A Dict that was made under its name meanwhile belongs to another run, and stays.
        """
        self._records.forget(run_id)
        what = f"removing the Dict {record_name(run_id)!r}"
        with contextlib.suppress(MissingError):
            self._ask(lambda: self._wire.remove_dict.aio(record), what)

    async def is_record(self, run_id: str) -> bool:
        """Return whether there is a Dict with the name of this run that is a record."""
        modal = import_modal()
        name = record_name(run_id)
        record = modal.Dict.from_name(name, **self._where)
        what = f"looking at the Dict {name!r}"
        try:
            return bool(await self._asked(record.contains.aio("launch"), what))
        except MissingError:  # removed meanwhile
            return False

    def record_names(self) -> list[str]:
        """Return the names of all Dicts that may be records of runs, oldest first."""
        modal = import_modal()
        where = self._where
        dicts = self._ask(lambda: modal.Dict.objects.list.aio(**where), "listing Dicts")
        return [record.name for record in reversed(dicts) if (record.name or "").startswith(PREFIX)]
