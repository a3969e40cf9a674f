"""Dicts, whose entries expire when they are not used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ._habits import ModalHabits, new_id
from ._refused import RefusedError, not_found


@dataclass
class Entry:
    """A value, and when it was used for the last time."""

    value: bytes
    used: float


@dataclass
class Dict:
    """One Dict.

    Attributes:
        dict_id: ``di-…``.
        name: its name.
        environment: the environment to which it belongs.
        created: when it was created, in seconds since the epoch.
    """

    dict_id: str
    name: str
    environment: str
    created: float
    entries: dict[bytes, Entry] = field(default_factory=dict)


class Dicts:
    """The Dicts of a workspace; its owner calls it under a lock.

    Keys and values are the bytes that the client has pickled. They are told apart by these bytes,
    as in Modal itself.
    """

    def __init__(self, now: Callable[[], float], habits: ModalHabits) -> None:
        self._now = now
        self._habits = habits
        self._dicts: dict[str, Dict] = {}

    def named(self, environment: str, name: str) -> Dict | None:
        """Return the Dict of a name; None if there is none."""
        matches = (item for item in self._dicts.values() if item.name == name)
        return next((item for item in matches if item.environment == environment), None)

    def by_id(self, dict_id: str) -> Dict:
        """Return the Dict of an ID.

        Raises:
            RefusedError: there is no such Dict.
        """
        if dict_id not in self._dicts:
            raise not_found(f"Dict with ID '{dict_id}' not found")
        return self._dicts[dict_id]

    def listed(self, environment: str, before: float) -> list[Dict]:
        """Return the Dicts of an environment, newest first.

        If ``before`` is given, only those that were created before that time.
        """
        kept = [item for item in self._dicts.values() if item.environment == environment]
        kept = [item for item in kept if not before or item.created < before]
        return kept[::-1]

    def create(self, environment: str, name: str) -> Dict:
        """Return a new Dict.

        Raises:
            RefusedError: there is a Dict of this name.
        """
        if self.named(environment, name) is not None:
            raise RefusedError("ALREADY_EXISTS", f"Dict '{name}' already exists")
        made = Dict(new_id("di"), name, environment, self._now())
        self._dicts[made.dict_id] = made
        return made

    def delete(self, dict_id: str) -> None:
        """Delete a Dict with all its entries.

        Raises:
            RefusedError: there is no such Dict.
        """
        del self._dicts[self.by_id(dict_id).dict_id]

    def put(self, dict_id: str, key: bytes, value: bytes, *, if_not_exists: bool = False) -> bool:
        """Write an entry; return False if ``if_not_exists`` is set and the key exists.

        Raises:
            RefusedError: there is no such Dict.
        """
        entries = self.entries(dict_id)
        if if_not_exists and key in entries:
            return False
        entries[key] = Entry(value, self._now())
        return True

    def get(self, dict_id: str, key: bytes) -> bytes | None:
        """Return the value of a key; None if there is none.

        Raises:
            RefusedError: there is no such Dict.
        """
        entry = self.entries(dict_id).get(key)
        if entry is None:
            return None
        entry.used = self._now()
        return entry.value

    def contents(self, dict_id: str) -> list[tuple[bytes, bytes]]:
        """Return keys and values, in the order in which they were first written.

        Reading them counts as a use of each.

        Raises:
            RefusedError: there is no such Dict.
        """
        entries = self.entries(dict_id)
        for entry in entries.values():
            entry.used = self._now()
        return [(key, entry.value) for key, entry in entries.items()]

    def entries(self, dict_id: str) -> dict[bytes, Entry]:
        """Return the entries, without those that have expired.

        Raises:
            RefusedError: there is no such Dict.
        """
        entries = self.by_id(dict_id).entries
        oldest = self._now() - self._habits.retention_seconds
        for key in [key for key, entry in entries.items() if entry.used <= oldest]:
            del entries[key]
        return entries
