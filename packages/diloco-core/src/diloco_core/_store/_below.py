"""A folder of a store as a store of its own, for stores that cannot create an object only if it does not exist."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from .._errors import ObjectNotFoundError
from ._api import RECORD_BYTES, InBackground

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from ._api import Buffer, ObjectReader, Store
    from ._transfer import Transfer

T = TypeVar("T")


class Below:
    """The objects of a store below a folder; see :class:`._api.Store`. Thread-safe.

    It creates an object by looking whether it exists and then writing it. That is enough where every key has one writer, or
    where all its writers write the same bytes.

    Args:
        store: The store.
        folder: The folder, with a slash at its end.
    """

    exclusive = False

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder
        self.uri = f"{store.uri}/{folder.rstrip('/')}"
        self.near = store.near
        self.retries = store.retries
        self.largest = store.largest

    @property
    def patience(self) -> float:
        """See :attr:`._api.Store.patience`."""
        return self._store.patience

    @patience.setter
    def patience(self, seconds: float) -> None:
        self._store.patience = seconds

    @property
    def downtime(self) -> float:
        """See :attr:`._api.Store.downtime`."""
        return self._store.downtime

    def put(self, key: str, parts: Iterable[Buffer]) -> int:
        """Write an object; see :meth:`._api.Store.put`."""
        return self._store.put(self._folder + key, parts)

    def create(self, key: str, data: bytes | Iterable[Buffer]) -> bool:
        """Write an object if a look shows that it does not exist. Returns whether this call wrote it."""
        try:
            self._store.open(self._folder + key).close()
        except ObjectNotFoundError:
            self._store.put(self._folder + key, [data] if isinstance(data, bytes) else data)
            return True
        return False

    def get(self, key: str, largest: int = RECORD_BYTES) -> bytes:
        """Read a whole small object; see :meth:`._api.Store.get`."""
        return self._store.get(self._folder + key, largest)

    def open(self, key: str, size: int | None = None) -> ObjectReader:
        """Open an object for ranged reads; see :meth:`._api.Store.open`."""
        return self._store.open(self._folder + key, size)

    def list(self, prefix: str) -> dict[str, int]:
        """Keys below a folder of this folder, and their sizes in bytes."""
        listing = self._store.list(self._folder + prefix)
        return {key.removeprefix(self._folder): size for key, size in listing.items()}

    def delete(self, keys: Iterable[str], *, unread: bool = False) -> None:
        """Delete objects; see :meth:`._api.Store.delete`."""
        self._store.delete([self._folder + key for key in keys], unread=unread)

    def close(self) -> None:
        """Release what the driver holds; see :meth:`._api.Store.close`."""
        self._store.close()


class _BelowInBackground(Below):
    """A folder of a store that can have several requests under way; see :class:`._api.InBackground`."""

    def __init__(self, store: InBackground, folder: str) -> None:
        super().__init__(store, folder)
        self._whole = store

    @property
    def transfer(self) -> Transfer:
        """How much may be under way at once."""
        return self._whole.transfer

    @property
    def budget(self) -> int:
        """Bytes that all reads ahead and uploads together may hold."""
        return self._whole.budget

    @budget.setter
    def budget(self, size: int) -> None:
        self._whole.budget = size

    @property
    def creates_at_once(self) -> int:
        """How many objects may be created at the same time while others are read."""
        return self._whole.creates_at_once

    def submit(self, act: Callable[[], T]) -> Future[T]:
        """Call ``act`` in one of the store's threads."""
        return self._whole.submit(act)


def below(store: Store, folder: str) -> Below:
    """The folder of a store as a store of its own."""
    return (
        _BelowInBackground(store, folder)
        if isinstance(store, InBackground)
        else Below(store, folder)
    )
