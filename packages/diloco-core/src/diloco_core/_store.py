"""The object store: the few operations that a run needs, and the driver for a URI.

Drivers: :mod:`._store_folder` for local folders (fsspec's ``file://`` is neither atomic nor exclusive) and
:mod:`._store_fsspec` for everything that fsspec speaks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Store(Protocol):
    """A prefix of an object store. Keys are relative, with ``/`` between parts. Thread-safe.

    Read-after-write and list-after-write are assumed, as S3, GCS, Azure and POSIX give them; listings are never cached.
    """

    uri: str
    near: bool
    """True where a request costs microseconds (a local folder, memory), False where it costs milliseconds."""

    def put(self, key: str, parts: Iterable[Buffer]) -> int:
        """Write an object in one step: no reader ever sees a part of it. Returns its size in bytes.

        A part may be reused by the caller as soon as the next one is asked for. If ``parts`` raises, nothing is written.
        """
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless the key exists; returns whether this call wrote it.

        Exactly one of several racing calls wins on stores with exclusive creation.
        """
        ...

    def get(self, key: str) -> bytes:
        """Read a whole small object.

        Raises:
            ObjectNotFoundError: The key does not exist.
        """
        ...

    def open(self, key: str) -> ObjectReader:
        """Open an object for ranged reads.

        Raises:
            ObjectNotFoundError: The key does not exist.
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


def open_store(uri: str) -> Store:
    """The store for a URI: a path or ``file://`` is a folder, everything else goes through fsspec.

    Raises:
        ConfigurationError: The URI is empty or malformed.
        StoreUnavailableError: Unknown scheme, or no access.
        MissingDependencyError: The fsspec driver of the scheme is not installed.
    """
    from ._errors import ConfigurationError
    from ._store_folder import FolderStore
    from ._store_fsspec import FsspecStore

    if not isinstance(uri, str) or not uri.strip():
        raise ConfigurationError(f"the rendezvous URI must be text such as 's3://bucket/run' or a folder, not {uri!r}")
    scheme, separator, _ = uri.partition("://")
    if not separator or scheme == "file":
        return FolderStore(uri)
    return FsspecStore(uri)
