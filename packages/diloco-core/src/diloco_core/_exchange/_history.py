"""The lines of an incarnation's history, and the objects that hold them. Nothing is sent here."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from diloco_protocol.telemetry import (
    HISTORY_BYTES,
    LINE_BYTES,
    HistoryKey,
    history_allowance,
    is_sealed,
)


class Newest(NamedTuple):
    """The newest object of a history, as it is to be written.

    Attributes:
        key: Its key.
        data: Its bytes.
        former: The key under which it was written before; empty if it was not.
    """

    key: str
    data: bytes
    former: str


class HistoryLines:
    """Collects lines until they are written. Not thread-safe.

    Memory is bounded by two objects: one that is written again, and lines that wait for the next.

    Args:
        rank: The rank of the replica.
        epoch: Its incarnation.

    Attributes:
        number: The number of lines so far, with those that were left out.
        dropped: How many were left out.
    """

    def __init__(self, rank: int, epoch: int) -> None:
        self.number = self.dropped = 0
        self._rank, self._epoch = rank, epoch
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._newest: list[tuple[int, bytes]] = []
        self._bytes_waiting = self._bytes_newest = self._bytes = 0
        self._stored = ""  # the key of the newest object
        self._opened = 0.0  # the age at which the object before it was sealed

    def add(self, line: bytes, age: float) -> None:
        """Add a line at this age of the incarnation in seconds, or leave it out if it is too much.

        That is where the store has not taken lines for too long, or there are too many in all.
        """
        self.number += 1
        room = self._bytes_waiting + len(line) <= HISTORY_BYTES
        if not room or self._bytes + len(line) > history_allowance(age):
            self.dropped += 1
            return
        self._waiting.append((self.number, line))
        self._bytes_waiting += len(line)
        self._bytes += len(line)

    def newest(self) -> Newest | None:
        """Return the newest object with all lines for which it has room; None without new ones."""
        while self._waiting:
            size = len(self._waiting[0][1])
            if self._bytes_newest + size > HISTORY_BYTES:
                break
            self._newest.append(self._waiting.popleft())
            self._bytes_waiting -= size
            self._bytes_newest += size
        if not self._newest:
            return None
        first, last = self._newest[0][0], self._newest[-1][0]
        key = HistoryKey(self._rank, self._epoch, first, last).key
        if key == self._stored:
            return None
        return Newest(key, b"".join(line for _, line in self._newest), self._stored)

    def written(self, key: str, age: float) -> None:
        """Note that the newest object was written under this key, at this age of the incarnation.

        It may be complete by that.
        """
        self._stored = key
        full = self._bytes_newest > HISTORY_BYTES - LINE_BYTES
        if full or is_sealed(age - self._opened, age):
            self._newest, self._bytes_newest = [], 0
            self._stored, self._opened = "", age
