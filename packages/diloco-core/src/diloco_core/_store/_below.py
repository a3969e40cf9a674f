"""A folder of a store as a store of its own, for stores that cannot create an object only if it does not exist."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._errors import ObjectNotFoundError
from ._api import RECORD_BYTES, InBackground

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ._api import Buffer, ObjectReader, Store
    from ._transfer import Transfer


def _passed_on(name: str) -> Any:
    """An attribute that is that of the whole store."""

    def get(below: Below) -> Any:
        return getattr(below.store, name)

    def set_(below: Below, value: object) -> None:
        setattr(below.store, name, value)

    return property(get, set_, doc=f"As :attr:`{name}` of the whole store.")


class Below:
    """The objects of a store below a folder; see :class:`._api.Store`. Thread-safe.

    It creates an object by looking whether it exists and then writing it. That is enough where every key has one writer, or
    where all its writers write the same bytes.

    Args:
        store: The whole store.
        folder: The folder, with a slash at its end.
    """

    exclusive = False
    near: bool = _passed_on("near")
    retries: bool = _passed_on("retries")
    largest: int | None = _passed_on("largest")
    patience: float = _passed_on("patience")
    downtime: float = _passed_on("downtime")

    def __init__(self, store: Store, folder: str) -> None:
        self.store = store
        self._folder = folder
        self.uri = f"{store.uri}/{folder.rstrip('/')}"

    def put(self, key: str, parts: Iterable[Buffer]) -> int:
        """Write an object; see :meth:`._api.Store.put`."""
        return self.store.put(self._folder + key, parts)

    def create(self, key: str, data: bytes | Iterable[Buffer]) -> bool:
        """Write an object if a look shows that it does not exist. Returns whether this call wrote it."""
        try:
            self.store.open(self._folder + key).close()
        except ObjectNotFoundError:
            self.store.put(self._folder + key, [data] if isinstance(data, bytes) else data)
            return True
        return False

    def get(self, key: str, largest: int = RECORD_BYTES) -> bytes:
        """Read a whole small object; see :meth:`._api.Store.get`."""
        return self.store.get(self._folder + key, largest)

    def open(self, key: str, size: int | None = None) -> ObjectReader:
        """Open an object for ranged reads; see :meth:`._api.Store.open`."""
        return self.store.open(self._folder + key, size)

    def list(self, prefix: str) -> dict[str, int]:
        """Keys below a folder of this folder, and their sizes in bytes."""
        listing = self.store.list(self._folder + prefix)
        return {key.removeprefix(self._folder): size for key, size in listing.items()}

    def delete(self, keys: Iterable[str], *, unread: bool = False) -> None:
        """Delete objects; see :meth:`._api.Store.delete`."""
        self.store.delete([self._folder + key for key in keys], unread=unread)

    def close(self) -> None:
        """Release what the driver holds; see :meth:`._api.Store.close`."""
        self.store.close()


class _BelowInBackground(Below):
    """A folder of a store that can have several requests under way; see :class:`._api.InBackground`."""

    transfer: Transfer = _passed_on("transfer")
    budget: int = _passed_on("budget")
    creates_at_once: int = _passed_on("creates_at_once")
    submit: Any = _passed_on("submit")


def below(store: Store, folder: str) -> Below:
    """The folder of a store as a store of its own."""
    kind = _BelowInBackground if isinstance(store, InBackground) else Below
    return kind(store, folder)
