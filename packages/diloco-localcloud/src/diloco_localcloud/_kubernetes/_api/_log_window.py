"""The part of a log that is asked for, as it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._control._runtime import Log


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
            start = next(
                (place for place, moment in enumerate(times) if moment >= since), len(times)
            )
        if self.tail is not None:
            start = max(start, len(times) - self.tail)
        return start

    def show(self, entries: list[tuple[float, bytes]]) -> bytes:
        """The bytes of these lines."""
        if not self.timestamps:
            return b"".join(line for _, line in entries)
        return b"".join(_stamp(moment).encode() + b" " + line for moment, line in entries)


def _stamp(moment: float) -> str:
    """Seconds since the epoch with nine digits of a second, as logs carry it."""
    whole = datetime.fromtimestamp(moment, UTC)
    return whole.strftime("%Y-%m-%dT%H:%M:%S.") + f"{whole.microsecond:06d}000Z"
