"""The model of S3: how long requests take, what they cost, and what all replicas see."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .weights import Weighed

KINDS = ("GET", "PUT", "LIST", "DELETE", "HEAD")
_READS = {"GET", "LIST", "HEAD"}


@dataclass(frozen=True, slots=True)
class S3:
    """How the store behaves.

    Attributes:
        latency: Seconds that a request takes besides its transfer.
        connection: Bytes per second of one connection.
        network: Bytes per second that a replica moves in one direction, over all of its
            connections.
        reads: GET, HEAD and LIST requests per second that the prefix takes; infinite to leave that
            out. S3 promises 5,500.
        writes: PUT and DELETE requests per second that the prefix takes. S3 promises 3,500.
        page: Keys in one answer to LIST.
        bulk: Keys that one DELETE removes: 1,000 through obstore, 1 through s3fs.
        head_reads: Whether opening an object is a GET of its first bytes (obstore) or a HEAD
            (s3fs).
        put_price: US dollars for a PUT or LIST.
        get_price: US dollars for a GET or HEAD.
    """

    latency: float = 0.03
    connection: float = 90e6
    network: float = 1.25e9
    reads: float = math.inf
    writes: float = math.inf
    page: int = 1000
    bulk: int = 1000
    head_reads: bool = True
    put_price: float = 5e-6
    get_price: float = 4e-7

    def dollars(self, requests: dict[str, float]) -> float:
        """What requests cost, by their kinds."""
        puts = requests.get("PUT", 0) + requests.get("LIST", 0)
        return (
            puts * self.put_price
            + (requests.get("GET", 0) + requests.get("HEAD", 0)) * self.get_price
        )


@dataclass(slots=True)
class Bucket:
    """What all replicas share: the objects, and how many requests the prefix takes.

    Attributes:
        objects: What can be seen.
        coming: What will have been written when requests in the background are through.
    """

    s3: S3
    objects: dict[str, Weighed] = field(default_factory=dict)
    coming: dict[str, Weighed] = field(default_factory=dict)
    _folders: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    _next: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})

    def admit(self, kind: str, time: float) -> float:
        """When a request that comes at some time is served, by the rates of the prefix."""
        reads = kind in _READS
        rate = self.s3.reads if reads else self.s3.writes
        if rate == math.inf:
            return time
        served = max(time, self._next[reads])
        self._next[reads] = served + 1 / rate
        return served

    def write(self, key: str, content: Weighed) -> None:
        """Show an object to everybody."""
        self.coming.pop(key, None)
        self.objects[key] = content
        for folder in _folders(key):
            self._folders[folder][key] = len(content.data)

    def remove(self, key: str) -> None:
        """Remove an object, if it is there."""
        if self.objects.pop(key, None) is not None:
            for folder in _folders(key):
                self._folders[folder].pop(key, None)

    def below(self, prefix: str) -> dict[str, int]:
        """Keys below a folder and their sizes."""
        folder = prefix.rstrip("/")
        return (
            dict(self._folders[folder])
            if folder
            else {k: len(v.data) for k, v in self.objects.items()}
        )


def _folders(key: str) -> list[str]:
    names = key.split("/")
    return ["/".join(names[:count]) for count in range(1, len(names))]
