"""What containers have written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ..._server import _timeline


class Log(Protocol):
    """The output of one life of one container; read under the cluster's lock."""

    ended: bool

    def times(self) -> list[float]:
        """When each line came."""

    def lines(self, start: int) -> list[tuple[float, bytes]]:
        """(time, line with its newline) from the ``start``-th on."""


@dataclass
class MemoryLog:
    """A log that a test writes."""

    entries: list[tuple[float, bytes]] = field(default_factory=list)
    ended: bool = False

    def write(self, moment: float, text: str) -> None:
        """Add text; one line is one entry, and text without a newline stays open."""
        for line in text.encode().splitlines(keepends=True):
            if self.entries and not self.entries[-1][1].endswith(b"\n"):
                old, head = self.entries.pop()
                self.entries.append((old, head + line))
            else:
                self.entries.append((moment, line))

    def times(self) -> list[float]:
        """See ``Log``."""
        return [moment for moment, _ in self.entries]

    def lines(self, start: int) -> list[tuple[float, bytes]]:
        """See ``Log``."""
        return self.entries[start:]


@dataclass(frozen=True)
class Window:
    """Which part of a log is asked for."""

    tail: int | None = None
    since: float | None = None  # seconds since the epoch
    limit: int | None = None  # bytes
    timestamps: bool = False

    def first(self, log: Log) -> int:
        """The number of the first line to show."""
        times = log.times()
        start = 0
        if self.since is not None:
            since = self.since
            start = next((place for place, moment in enumerate(times) if moment >= since), len(times))
        if self.tail is not None:
            start = max(start, len(times) - self.tail)
        return start

    def show(self, entries: list[tuple[float, bytes]]) -> bytes:
        """The bytes of these lines."""
        if not self.timestamps:
            return b"".join(line for _, line in entries)
        return b"".join(_timeline.micro_stamp(moment).encode() + b" " + line for moment, line in entries)
