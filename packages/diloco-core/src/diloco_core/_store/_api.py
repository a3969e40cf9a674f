"""The object store: the few operations that a run needs."""

from __future__ import annotations

import math
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Protocol, Self, TypeAlias, TypeVar

from .._errors import ConfigurationError, CorruptedObjectError, ObjectNotFoundError
from ._transfer import BLOCK_BYTES, Transfer

T = TypeVar("T")

_PROBES = 3
RECORD_BYTES = 64 * 2**20
"""The largest record in bytes: a manifest of 200,000 tensors, or a commit of 100,000 members."""

# Anything with the buffer protocol; typing it as collections.abc.Buffer needs Python 3.12.
Buffer: TypeAlias = "bytes | bytearray | memoryview"


class Closing(ABC):
    """Something that is closed at the end of its ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Release what it holds; repeatable."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ObjectReader(Closing):
    """One object, open for ranged reads. Not thread-safe."""

    size: int

    @abstractmethod
    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` (writable bytes) from ``offset``.

        Raises:
            CorruptedObjectError: The object ends before the buffer is full.
        """

    def expect(self, start: int, stop: int) -> None:
        """Announce that bytes ``start`` to ``stop`` will be read in order.

        They come after everything that was announced before, for other objects of the store, too.
        Bytes that are announced and not read yet may be announced again. Closing the reader
        withdraws what it has announced. Readers that fetch nothing ahead do nothing.
        """


def read_bytes(reader: ObjectReader, start: int, stop: int) -> bytes:
    """The bytes of an open object from ``start`` to ``stop``."""
    data = bytearray(stop - start)
    reader.read_into(start, memoryview(data))
    return bytes(data)


class InBackground(Protocol):
    """The requests of a store that are sent by threads of its own, several at the same time."""

    settings: Transfer
    """How much may be under way at once."""
    budget: int
    """Bytes that all reads ahead and uploads together may hold. It may be set at any time."""

    @property
    def creates_at_once(self) -> int:
        """Return how many objects may be created at the same time while others are read."""

    def submit(self, act: Callable[[], T]) -> Future[T]:
        """Call ``act`` in one of the threads; it must not wait for anything else that they do."""


class Requests:
    """Count requests to a store by what stores take for them. Thread-safe.

    Attributes:
        writes: Those that write or list. A list of many keys counts once.
        reads: Those that read. Deletions cost nothing, and are not counted.
    """

    def __init__(self) -> None:
        self.writes = self.reads = 0
        self._lock = threading.Lock()

    def count(self, verb: str, number: int = 1) -> None:
        """Count some that do the same."""
        with self._lock:
            if verb == "read":
                self.reads += number
            elif verb != "delete":
                self.writes += number


class Store(Protocol):
    """A prefix of an object store. Keys are relative, with ``/`` between parts. Thread-safe.

    Read-after-write and list-after-write are assumed, as S3, GCS, Azure and POSIX give them;
    listings are never cached.
    """

    uri: str
    near: bool
    """True where a request takes microseconds (a local folder, memory), and not milliseconds."""
    retries: bool
    """True if the store retries before it raises StoreUnavailableError, so callers need not."""

    exclusive: bool
    """True if the driver creates an object in one step.

    Otherwise it first looks whether the key exists, and then writes.
    """
    largest: int | None
    """The most bytes that an object may have, if there is a limit."""
    patience: float
    """For how many seconds a request is tried again while the store is unavailable.

    It may be set at any time.

    Stores that do not retry by themselves leave that to :class:`._patient.Patient`, which obeys
    this number.
    """

    @property
    def background(self) -> InBackground | None:
        """Its requests in the background; None if it has no threads."""

    @property
    def requests(self) -> Requests | None:
        """Counts the requests that this process has sent; None if it sends none, as to a folder."""

    @property
    def downtime(self) -> float:
        """Seconds for which requests of this process have waited for an unavailable store so far.

        The time of a request counts from the beginning of its first try that failed to its success
        or its last failure. Requests that wait at the same time count once. A clock from which this
        is subtracted stands still in the meantime: no replica may be taken for dead just because
        the store was away. Always 0.0 for stores that do not retry.
        """

    def put(self, key: str, parts: Iterable[Buffer]) -> int:
        """Write an object in one step: no reader ever sees a part of it. Returns its size in bytes.

        The caller may reuse a part as soon as the next one is asked for. Only parts in a list or a
        tuple must not change until this returns, since they are not copied. If ``parts`` raises an
        error, nothing is written.
        """

    def create(self, key: str, data: bytes | Iterable[Buffer]) -> bool:
        """Write an object unless the key exists; returns whether this call wrote it.

        On stores with exclusive creation, exactly one of several racing calls wins. Parts are
        treated as in :meth:`put`. Over a network, where answers get lost, calls with the very same
        bytes cannot be distinguished: all of them may "win". A call that wrote a large object may
        still return False. So after False, always read what is there.
        """

    def get(self, key: str, largest: int = RECORD_BYTES) -> bytes:
        """Read a whole small object.

        An object of more than ``largest`` bytes is refused before its bytes are read: use
        :meth:`open` for those.

        Raises:
            ObjectNotFoundError: The key does not exist.
            CorruptedObjectError: The object has more than ``largest`` bytes.
        """

    def open(self, key: str, size: int | None = None) -> ObjectReader:
        """Open an object for ranged reads.

        If the caller passes its ``size`` in bytes, a driver need not ask the store for it.

        Raises:
            ObjectNotFoundError: The key does not exist. If ``size`` was passed, the first read may
                raise this instead.
        """

    def list(self, prefix: str) -> dict[str, int]:
        """Return the keys below the folder ``prefix`` and their sizes in bytes, complete and fresh.

        ``prefix`` ends in ``/``.
        """

    def delete(self, keys: Iterable[str], *, unread: bool = False) -> None:
        """Delete objects; keys that do not exist are ignored.

        With ``unread``, the caller promises that no process reads the objects any more, so that a
        driver may write over their space.
        """

    def close(self) -> None:
        """Release what the driver holds; repeatable, and the store may still be used."""


def block_bytes_of(store: Store) -> int:
    """Return how many bytes of one object are read before the next object is read.

    It is 0 where requests cost nothing.
    """
    if store.near:
        return 0
    return BLOCK_BYTES if store.background is None else store.background.settings.block_bytes


def is_key(key: str) -> bool:
    """Say whether an object of a run can have this key.

    The answer is False for objects that store browsers and desktops leave behind: placeholders of
    folders (``deltas/``), ``.DS_Store``.
    """
    # No name between slashes is empty or begins with a dot.
    return key.isprintable() and "//" not in f"/{key}/" and "/." not in f"/{key}"


def too_large(origin: str, size: int, largest: int) -> CorruptedObjectError:
    """The error for an object that is larger than what may be read in one piece."""
    error = CorruptedObjectError(
        f"{origin} has {size} bytes, and at most {largest} bytes are read in one piece here, so "
        "this is not the object that the run has written. It was not read."
    )
    error.unread = True
    return error


def creates_once(
    store: Store, attempt: Callable[[Callable[[], bool]], bool] = lambda act: act()
) -> bool:
    """Say whether the store keeps the promise of :meth:`Store.create`.

    Some stores accept conditional writes and ignore the condition; creating one key twice shows
    that. Some drivers first look and then write. Only a race would show that, so those drivers have
    to declare it (:attr:`Store.exclusive`). Only a small object is tried. Over a network, a large
    one is created in another way: the completion of its multipart upload is conditional. Trying
    that would take two parts, the first of which must have 5 MiB on S3.

    Args:
        store: The store.
        attempt: Calls a function, and calls it again while the store is unavailable.
    """
    if not store.exclusive:
        return False
    keys: list[str] = []

    def create() -> bool:
        keys.append(f"probes/{secrets.token_hex(8)}")
        return store.create(keys[-1], b"first")

    def create_twice() -> bool:
        # A new key that is taken: an answer was lost, and a bit flipped when it was read who had
        # taken it. Another key will tell.
        if not any(create() for _ in range(_PROBES)):
            return False
        key = keys[-1]
        if store.create(key, b"second"):
            return False
        # Not compared with b"first": a bit that flips in transit must not look like a failure.
        return store.get(key) != b"second"

    def clean_up() -> bool:
        store.delete(keys)
        return True

    try:
        return attempt(create_twice)
    finally:
        attempt(clean_up)


def check_size(store: Store, size: int) -> None:
    """Refuse a fragment whose contributions would be too large for the store.

    Args:
        store: The store.
        size: The size of the fragment's values in bytes.

    Raises:
        ConfigurationError: The fragment is too large; the error says into how many to cut it.
    """
    # The header and the checksums take far less than a hundredth of a contribution.
    if store.largest is not None and size > (most := 0.99 * store.largest):
        raise ConfigurationError(
            f"a fragment of {size / 1e9:.0f} GB is too large for one object in {store.uri}, which "
            f"can have at most {store.largest / 1e9:.0f} GB: cut it into "
            f"{math.ceil(size / most)} fragments or more"
        )


def _passed_on(name: str) -> Any:
    """An attribute that is that of the whole store."""

    def get(below: Below) -> Any:
        return getattr(below.store, name)

    def set_(below: Below, value: object) -> None:
        setattr(below.store, name, value)

    return property(get, set_, doc=f"As :attr:`{name}` of the whole store.")


class Below:
    """The objects of a store below a folder; see :class:`._api.Store`. Thread-safe.

    It creates an object by looking whether it exists and then writing it. That is enough where
    every key has one writer, or where all its writers write the same bytes.

    Args:
        store: The whole store.
        folder: The folder, with a slash at its end.
    """

    exclusive = False
    near: bool = _passed_on("near")
    retries: bool = _passed_on("retries")
    largest: int | None = _passed_on("largest")
    background: InBackground | None = _passed_on("background")
    patience: float = _passed_on("patience")
    downtime: float = _passed_on("downtime")
    requests: Requests | None = _passed_on("requests")

    def __init__(self, store: Store, folder: str) -> None:
        self.store = store
        self._folder = folder
        self.uri = f"{store.uri}/{folder.rstrip('/')}"

    def put(self, key: str, parts: Iterable[Buffer]) -> int:
        """Write an object; see :meth:`._api.Store.put`."""
        return self.store.put(self._folder + key, parts)

    def create(self, key: str, data: bytes | Iterable[Buffer]) -> bool:
        """Write an object if a look shows that it does not exist.

        Returns whether this call wrote it.
        """
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
