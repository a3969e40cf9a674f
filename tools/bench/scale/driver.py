"""The requests of an S3 driver, sent over the model: above it is the real :class:`RemoteStore`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from diloco_core._store._drivers._driver import TooLargeError, Verdict

from .weights import Weighed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from diloco_core._store._drivers._driver import Sending

    from .network import Network

HEAD_BYTES = 64 * 2**10
"""What obstore's driver reads when an object is opened."""


class MissingError(Exception):
    """There is no such object."""


class ExistsError(Exception):
    """There is one already."""


class VirtualDriver:
    """Single requests; see :class:`diloco_core._store._drivers._driver.Driver`.

    Args:
        network: The replica's connections.
        factor: How many bytes a byte of values stands for.
        part_bytes: Bytes of a part of an upload, as they are sent.
    """

    name = "S3 in virtual time"
    near = False
    exclusive = True

    def __init__(self, network: Network, factor: int, part_bytes: int) -> None:
        self.network = network
        self._bucket = network.bucket
        self._factor = factor
        self._part_bytes = part_bytes
        self.copies = 0 if network.s3.head_reads else 2  # as obstore and s3fs do
        self.deletes_many = network.s3.bulk > 1

    def put(self, key: str, data: Any, *, exclusive: bool) -> None:
        """Write an object with one request."""
        content = Weighed(key, bytes(data), self._factor)
        self.network.request("PUT", up=content.weight)
        self._appear(key, content, exclusive)

    def upload(self, key: str, blocks: Iterator[Any], sending: Sending) -> None:
        """Write a large object in parts, or in one request if it must be new, as obstore does."""
        content = Weighed(key, b"".join(blocks), self._factor)
        weight = content.weight
        if weight <= self._part_bytes or (sending.exclusive and self._bucket.s3.head_reads):
            self.network.request("PUT", up=weight)
        else:
            count = -(-weight // self._part_bytes)
            sizes = [self._part_bytes] * (count - 1) + [weight - (count - 1) * self._part_bytes]
            self.network.upload(sizes, sending.at_once)
        self._appear(key, content, sending.exclusive)

    def get(self, key: str, largest: int) -> bytes:
        """Read a whole object."""
        there = self._bucket.objects.get(key)
        size = 0 if there is None or len(there.data) > largest else there.weight
        self.network.request("GET", down=size)
        found = self._find(key)
        if len(found.data) > largest:
            raise TooLargeError(len(found.data))
        return found.data

    def head(self, key: str) -> tuple[int, Any]:
        """Size of an object, and with obstore its first bytes."""
        there = self._bucket.objects.get(key)
        if not self._bucket.s3.head_reads:
            self.network.request("HEAD")
            return len(self._find(key).data), b""
        stop = 0 if there is None else there.reaching(HEAD_BYTES)
        self.network.request("GET", down=0 if there is None else there.between(0, stop))
        found = self._find(key)
        return len(found.data), memoryview(found.data)[: found.reaching(HEAD_BYTES)]

    def range(self, key: str, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop`` of an object."""
        there = self._bucket.objects.get(key)
        self.network.request("GET", down=0 if there is None else there.between(start, stop))
        return memoryview(self._find(key).data)[start:stop]

    def list(self, prefix: str) -> dict[str, int]:
        """Keys below a folder and their sizes, page after page."""
        for _ in range(max(1, -(-len(self._bucket.below(prefix)) // self._bucket.s3.page))):
            self.network.request("LIST")
        return self._bucket.below(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects."""
        for start in range(0, len(keys), self._bucket.s3.bulk):
            self.network.request("DELETE")
            for key in keys[start : start + self._bucket.s3.bulk]:
                if self.network.in_background:
                    self.network.time.call_at(
                        self.network.clock(), partial(self._bucket.remove, key)
                    )
                else:
                    self._bucket.remove(key)

    def judge(self, error: Exception) -> tuple[Verdict, str]:
        """What an error means."""
        if isinstance(error, MissingError):
            return Verdict.MISSING, str(error)
        if isinstance(error, ExistsError):
            return Verdict.EXISTS, str(error)
        return Verdict.PERMANENT, f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Nothing is held."""

    def _find(self, key: str) -> Weighed:
        found = self._bucket.objects.get(key)
        if found is None and self.network.in_background:
            found = self._bucket.coming.get(key)
        if found is None:
            raise MissingError(key)
        return found

    def _appear(self, key: str, content: Weighed, exclusive: bool) -> None:
        """Note that the request that writes an object is done, now or in the background."""
        if exclusive and (key in self._bucket.objects or key in self._bucket.coming):
            raise ExistsError(key)
        if self.network.in_background:
            self._bucket.coming[key] = content
            self.network.time.call_at(
                self.network.clock(), partial(self._bucket.write, key, content)
            )
        else:
            self._bucket.write(key, content)
