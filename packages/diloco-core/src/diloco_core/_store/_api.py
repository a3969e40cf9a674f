"""The object store: the few operations that a run needs of it."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

from .._errors import ConfigurationError, CorruptedObjectError
from ._transfer import BLOCK_BYTES, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future
    from types import TracebackType

T = TypeVar("T")

RECORD_BYTES = 64 * 2**20
"""Largest size of a record in bytes: the manifest of a model with 200,000 tensors, or the commit of 100,000 members."""

# Anything with the buffer protocol; typing it as collections.abc.Buffer needs Python 3.12.
Buffer: TypeAlias = "bytes | bytearray | memoryview"


class ObjectReader(Protocol):
    """One object, open for ranged reads. Not thread-safe."""

    size: int

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` (writable bytes) from ``offset``.

        Raises:
            CorruptedObjectError: The object ends before the buffer is full.
        """
        ...

    def close(self) -> None:
        """Release the object; repeatable."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@runtime_checkable
class ReadsAhead(Protocol):
    """A reader that profits from knowing what will be read."""

    def expect(self, start: int, stop: int) -> None:
        """Bytes ``start`` to ``stop`` will be read, in order, after all that was announced before of whichever object.

        What was announced already and not read yet may be said again. Closing the reader takes it back.
        """
        ...


class Store(Protocol):
    """A prefix of an object store. Keys are relative, with ``/`` between parts. Thread-safe.

    Read-after-write and list-after-write are assumed, as S3, GCS, Azure and POSIX give them; listings are never cached.
    """

    uri: str
    near: bool
    """True where a request costs microseconds (a local folder, memory), False where it costs milliseconds."""
    retries: bool
    """Whether the store itself has tried for long when it raises StoreUnavailableError, so that nobody else has to."""

    exclusive: bool
    """Whether the driver creates in one step; False where it first looks and then writes."""
    largest: int | None
    """The most bytes that an object may have, if there is a limit."""

    patience: float
    """For how many seconds a request is tried again while the store is unavailable. It may be set at any time.

    Stores that do not retry by themselves leave that to :class:`._patient.Patient`, which heeds this number.
    """

    @property
    def downtime(self) -> float:
        """For how many seconds, so far, requests of this process were kept waiting by an unavailable store.

        The time of a request counts from the beginning of its first try that failed to its success or its last failure.
        Requests that wait at the same time count once. A clock from which this is subtracted stands still meanwhile:
        nobody is to be taken for dead because the store was away. Always 0.0 where the store does not retry.
        """
        ...

    def put(self, key: str, parts: Iterable[Buffer]) -> int:
        """Write an object in one step: no reader ever sees a part of it. Returns its size in bytes.

        A part may be reused by the caller as soon as the next one is asked for, but for those in a list or tuple: they must
        stay as they are until this returns, and need not be copied. If ``parts`` raises, nothing is written.
        """
        ...

    def create(self, key: str, data: bytes | Iterable[Buffer]) -> bool:
        """Write an object unless the key exists; returns whether this call wrote it.

        Exactly one of several racing calls wins on stores with exclusive creation. Parts are treated as in :meth:`put`.
        Calls with the very same bytes cannot be told apart over a network, where answers get lost: all of them may "win".
        Large objects that this call wrote may be taken for another's. So on False read what is there, whoever wrote it.
        """
        ...

    def get(self, key: str, largest: int = RECORD_BYTES) -> bytes:
        """Read a whole small object.

        An object of more than ``largest`` bytes is refused before its bytes are read: use :meth:`open` for those.

        Raises:
            ObjectNotFoundError: The key does not exist.
            CorruptedObjectError: The object is larger than anything that is kept in one piece.
        """
        ...

    def open(self, key: str, size: int | None = None) -> ObjectReader:
        """Open an object for ranged reads.

        Where the caller knows its ``size`` in bytes, a driver may leave out asking for it.

        Raises:
            ObjectNotFoundError: The key does not exist. Where ``size`` was given it may be raised by the first read.
        """
        ...

    def list(self, prefix: str) -> dict[str, int]:
        """Keys below the folder ``prefix`` (which ends in ``/``) and their sizes in bytes; complete and fresh."""
        ...

    def delete(self, keys: Iterable[str], *, unread: bool = False) -> None:
        """Remove objects; those that do not exist are passed over.

        ``unread`` promises that nobody reads them any more, so that a driver may write over their space.
        """
        ...

    def close(self) -> None:
        """Let go of what the driver holds; repeatable, and the store may still be used."""
        ...


@runtime_checkable
class InBackground(Store, Protocol):
    """A store that can have several requests under way."""

    transfer: Transfer
    """How much may be under way at once."""
    budget: int
    """Bytes that may be held of what is read ahead or on its way up, by all together. It may be set at any time."""

    @property
    def creates_at_once(self) -> int:
        """How many objects may be created at the same time beside what is read."""
        ...

    def submit(self, act: Callable[[], T]) -> Future[T]:
        """Do something in one of the store's threads."""
        ...


def block_bytes_of(store: Store) -> int:
    """How much is read of one object before the next one's turn; 0 where requests cost nothing."""
    if store.near:
        return 0
    return store.transfer.block_bytes if isinstance(store, InBackground) else BLOCK_BYTES


def is_key(key: str) -> bool:
    """Whether an object of a run can have this key.

    What browsers of stores and desktops leave behind cannot: placeholders of folders (``deltas/``), ``.DS_Store``.
    """
    return key.isprintable() and all(name and not name.startswith(".") for name in key.split("/"))


def too_large(origin: str, size: int, largest: int) -> CorruptedObjectError:
    """The error for an object that is larger than what is read in one piece."""
    return CorruptedObjectError(
        f"{origin} has {size} bytes, and at most {largest} bytes are read in one piece here: this is not what was written "
        "under this key. None of it was read."
    )


def creates_once(
    store: Store, attempt: Callable[[Callable[[], bool]], bool] = lambda act: act()
) -> bool:
    """Whether the store keeps its promise of :meth:`Store.create`.

    Some accept conditional writes and ignore them, which two creates show. Some drivers look first and write then, which no
    creates but racing ones show: those have to know it. Only a small object is tried. A large one goes another way over a
    network (the completion of a multipart upload is what is conditional then), and to try that takes two parts, of which S3
    wants the first to have 5 MiB.

    Args:
        store: The store.
        attempt: Calls what it is given, again where the store is unavailable.
    """
    if not store.exclusive:
        return False
    keys = []

    def try_it() -> bool:
        key = f"probes/{secrets.token_hex(8)}"
        keys.append(key)
        if not store.create(key, b"first") or store.create(key, b"second"):
            return False
        return store.get(key) != b"second"  # a bit that flips on its way makes neither of the two

    def clean_up() -> bool:
        store.delete(keys)
        return True

    try:
        return attempt(try_it)
    finally:
        attempt(clean_up)


def most_values(largest: int) -> float:
    """Most bytes of values that a contribution can have, which is one object of at most ``largest`` bytes."""
    return 0.99 * largest  # its header and checksums are far below a hundredth


def check_size(store: Store, size: int) -> None:
    """Refuse fragments whose contributions the store could not take.

    Args:
        store: The store.
        size: A fragment's values in bytes.

    Raises:
        ConfigurationError: It says how many fragments it takes.
    """
    if store.largest is not None and size > most_values(store.largest):
        raise ConfigurationError(
            f"a fragment of {size / 1e9:.0f} GB is too large for one object in {store.uri}, which can have "
            f"{store.largest / 1e9:.0f} GB: cut it into {math.ceil(size / most_values(store.largest))} fragments or more"
        )
