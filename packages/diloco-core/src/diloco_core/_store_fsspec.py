"""Objects through fsspec: S3, GCS, Azure, memory and whatever else has a driver."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Self

import fsspec
from fsspec.registry import known_implementations

from diloco_protocol import MissingDependencyError

from ._errors import (
    ConfigurationError,
    CorruptedObjectError,
    ObjectNotFoundError,
    StoreError,
    StoreUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from ._store import Buffer

# What the reader asks for at once: large enough to hide latency, small enough for one block per peer in memory.
_BLOCK_BYTES = 16 * 2**20

_PACKAGES = {
    "s3": "diloco-core[s3]",
    "s3a": "diloco-core[s3]",
    "gs": "diloco-core[gcs]",
    "gcs": "diloco-core[gcs]",
    "az": "diloco-core[azure]",
    "abfs": "diloco-core[azure]",
    "abfss": "diloco-core[azure]",
}


class FsspecStore:
    """A prefix of any store that fsspec has a driver for; see :class:`._store.Store`. Thread-safe.

    Credentials come from the driver's own chain. Listings are never cached. An object is held in memory while it is
    uploaded; reads ask for 16 MiB at a time.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        scheme = uri.partition("://")[0]
        self.near = scheme == "memory"
        self._fs, self._root = _filesystem(uri, scheme)
        self._probe()

    def put(self, key: str, parts: Iterable[Buffer]) -> int:
        """Write an object in one step; see :meth:`._store.Store.put`."""
        data = bytearray()
        for part in parts:  # one by one: a part is reused when the next one is asked for
            data += part
        try:
            self._fs.pipe_file(self._path(key), bytes(data))
        except OSError as error:
            raise self._failed("write", key, error) from error
        return len(data)

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless the key exists; see :meth:`._store.Store.create`."""
        try:
            self._fs.pipe_file(self._path(key), data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            if _exists_already(error):
                return False
            raise self._failed("create", key, error) from error
        return True

    def get(self, key: str) -> bytes:
        """Read a whole object; see :meth:`._store.Store.get`."""
        try:
            return bytes(self._fs.cat_file(self._path(key)))
        except FileNotFoundError:
            raise self._missing(key) from None
        except OSError as error:
            raise self._failed("read", key, error) from error

    def open(self, key: str) -> BlockReader:
        """Open an object for ranged reads; see :meth:`._store.Store.open`."""
        path = self._path(key)
        try:
            size = int(self._fs.info(path)["size"])
        except FileNotFoundError:
            raise self._missing(key) from None
        except OSError as error:
            raise self._failed("read", key, error) from error
        return BlockReader(self._fs, path, f"{self.uri}/{key}", size)

    def list(self, prefix: str) -> dict[str, int]:
        """Keys below a folder and their sizes; see :meth:`._store.Store.list`."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(self._path(prefix.rstrip("/")), detail=True)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise self._failed("list", prefix, error) from error
        start = len(self._root) + 1
        return {path[start:]: int(info["size"]) for path, info in sorted(found.items())}

    def delete(self, keys: Iterable[str], *, unread: bool = False) -> None:  # noqa: ARG002 - nothing to reuse
        """Remove objects; see :meth:`._store.Store.delete`."""
        for key in keys:
            try:
                self._fs.rm_file(self._path(key))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._failed("delete", key, error) from error

    def close(self) -> None:
        """Nothing is held."""

    def _probe(self) -> None:
        key, token = f"probes/{secrets.token_hex(8)}", secrets.token_bytes(8)
        try:
            self._fs.pipe_file(self._path(key), token)
            found = bytes(self._fs.cat_file(self._path(key)))
            self._fs.rm_file(self._path(key))
        except Exception as error:  # every driver has its own errors, and each means: not usable
            raise StoreUnavailableError(
                f"{self.uri} cannot be written and read back ({type(error).__name__}: {error}). "
                "Check that the bucket exists and that this process's credentials may put, get, list and delete there."
            ) from error
        if found != token:
            raise StoreUnavailableError(f"{self.uri} returned something else than what was just written there")

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _missing(self, key: str) -> ObjectNotFoundError:
        return ObjectNotFoundError(f"there is no object {key!r} in {self.uri}")

    def _failed(self, verb: str, key: str, error: OSError) -> StoreError:
        return StoreUnavailableError(f"cannot {verb} object {key!r} in {self.uri}: {error}")


class BlockReader:
    """Ranged reads through one block of read-ahead; see :class:`._store.ObjectReader`."""

    def __init__(self, fs: Any, path: str, name: str, size: int) -> None:
        self.size = size
        self._fs = fs
        self._path = path
        self._name = name
        self._start = 0
        self._block = b""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; see :meth:`._store.ObjectReader.read_into`."""
        end = offset + len(buffer)
        if end > self.size:
            raise CorruptedObjectError(
                f"{self._name} is truncated: it has {self.size} bytes, and bytes {offset} to {end} were asked for"
            )
        if not (self._start <= offset and end <= self._start + len(self._block)):
            stop = min(self.size, max(end, offset + _BLOCK_BYTES))
            self._block = bytes(self._fs.cat_file(self._path, start=offset, end=stop))
            self._start = offset
            if len(self._block) != stop - offset:
                raise CorruptedObjectError(f"{self._name}: {len(self._block)} of {stop - offset} bytes came back")
        buffer[:] = self._block[offset - self._start : end - self._start]

    def close(self) -> None:
        """Drop the block; repeatable."""
        self._block = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _filesystem(uri: str, scheme: str) -> tuple[Any, str]:
    try:
        # Caches would hide what other replicas write, and shared instances would bring them back.
        fs, root = fsspec.core.url_to_fs(uri, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        advice = f"pip install '{package}'" if package else known_implementations.get(scheme, {}).get("err", str(error))
        raise MissingDependencyError(
            f"{uri!r} needs the fsspec driver for {scheme}://, which is missing: {advice}"
        ) from error
    except ValueError as error:
        raise ConfigurationError(
            f"{uri!r} has the unknown scheme {scheme!r}. Known are a folder, file://, memory://, s3://, gs://, az:// "
            "and the other schemes that fsspec has a driver for."
        ) from error
    except Exception as error:  # every driver has its own errors
        raise StoreUnavailableError(f"{uri} cannot be opened ({type(error).__name__}: {error})") from error
    return fs, str(root).rstrip("/")


def _exists_already(error: OSError) -> bool:
    """Whether a store said "exists already" in words that its driver did not turn into FileExistsError."""
    response = getattr(error.__cause__, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return code == "PreconditionFailed"
