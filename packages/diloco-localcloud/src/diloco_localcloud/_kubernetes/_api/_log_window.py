"""The part of a log that a request asks for, as it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from .._control._runtime import Log


@dataclass(frozen=True)
class Window:
    """The part of a log that a request asks for."""

    tail: int | None = None
    since: float | None = None  # seconds since the epoch
    limit: int | None = None  # bytes
    timestamps: bool = False

    def first(self, log: Log) -> int:
        """Return the number of the first entry to show."""
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

    def show(self, entries: list[tuple[float, bytes]], *, begun: bool) -> bytes:
        """Return the text of these entries.

        ``begun`` says that the entry before the first one was part of the same line. As in the
        source of the kubelet, a time stands before the first entry of each line shown here.
        """
        text = []
        for moment, entry in entries:
            if self.timestamps and not begun:
                text.append(_stamp(moment).encode() + b" ")
            text.append(entry)
            begun = not entry.endswith(b"\n")
        return b"".join(text)


def _stamp(moment: float) -> str:
    """Return seconds since the epoch as a time with nine digits of a second, as in logs."""
    whole = datetime.fromtimestamp(moment, UTC)
    return whole.strftime("%Y-%m-%dT%H:%M:%S.") + f"{whole.microsecond:06d}000Z"
