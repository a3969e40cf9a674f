"""Reading below a prefix of a store, through fsspec, which is imported when a store is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from diloco_protocol import InvalidRequestError, MissingDependencyError, UnavailableError

T = TypeVar("T")

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure"}
# What changes whenever an object is written again, by the names that drivers give it.
_STAMPS = ("ETag", "etag", "generation", "mtime", "LastModified", "last_modified", "created")


class Store:
    """The objects below a prefix. It only reads, and raises errors of the protocol alone.

    Args:
        uri: The prefix: a folder, ``s3://…``, or whatever fsspec has a driver for.

    Raises:
        InvalidRequestError: It is not such a prefix.
        MissingDependencyError: The driver is not installed.
    """

    def __init__(self, uri: str) -> None:
        scheme, separator, rest = uri.partition("://")
        if "::" in uri or (separator and scheme != "file" and "@" in rest.partition("/")[0]):
            raise InvalidRequestError(
                f"{uri} is not the URI of a run: give a folder, or a prefix such as "
                "s3://bucket/run-1; user and password come from the driver's own chain"
            )
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        options = {"skip_instance_cache": True, "use_listings_cache": False}
        try:
            self._fs, root = fsspec.core.url_to_fs(uri, **({} if scheme == "memory" else options))
        except ImportError as error:
            extra = _EXTRAS.get(scheme)
            hint = f": pip install 'diloco-cli[{extra}]'" if extra else f" ({error})"
            raise MissingDependencyError(
                f"the driver for {scheme}:// is not installed here{hint}"
            ) from None
        except ValueError as error:
            raise InvalidRequestError(f"{uri} cannot be opened: {error}") from None
        self.uri, self._root = uri.rstrip("/"), root.rstrip("/")
        # In a folder, links could lead in circles. Elsewhere a depth would take more requests.
        self._depth = {"maxdepth": 2} if isinstance(self._fs, LocalFileSystem) else {}
        self._empty: set[str] = set()

    def list_keys(self, folder: str) -> Iterator[tuple[str, object]]:
        """Yield the keys below a folder, each with what changes if it is written again."""
        path = self._path(folder)
        found = self._do(lambda: self._fs.find(path, detail=True, **self._depth)) or {}
        for name, info in found.items():
            if info.get("type") == "file" and not info.get("islink"):
                key = name[len(self._root) + 1 :]
                if not info.get("size"):
                    self._empty.add(key)  # has no first byte that could be asked for
                stamps = [info[each] for each in _STAMPS if info.get(each) is not None]
                yield key, (*stamps, info.get("size")) if stamps else None

    def read(self, key: str, most: int) -> bytes | None:
        """Return so many bytes of an object from its beginning; None if there is none."""
        if key in self._empty:
            return b""
        data = self._do(lambda: self._fs.cat_file(self._path(key), start=0, end=most))
        return None if data is None else bytes(data[:most])

    def names(self, folder: str) -> list[str]:
        """Return the names of what is directly in a folder."""
        path = self._path(folder)
        paths = self._do(lambda: self._fs.ls(path, detail=False)) or []
        return [name.rstrip("/").rpartition("/")[2] for name in paths]

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}".rstrip("/")

    def _do(self, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # noqa: BLE001 - drivers raise errors of their own
            raise UnavailableError(
                f"{self.uri} cannot be read: {type(error).__name__}: {error}"
            ) from None


def is_uri(run: str) -> bool:
    """Return whether what was given is the URI or folder of a run, and not its name."""
    return "/" in run or run in {".", ".."}
