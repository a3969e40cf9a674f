"""The log of one run of one container."""

from __future__ import annotations

from ._runtime import ENTRY_BYTES


class MemoryLog:
    """A log that is kept in memory, entry by entry."""

    def __init__(self) -> None:
        self.ended = False
        self._entries: list[tuple[float, bytes]] = []

    def write(self, moment: float, text: str | bytes) -> None:
        """Add text; an unfinished line is shown at once, and grows."""
        data = text.encode() if isinstance(text, str) else text
        # Only at newlines, as in the container runtime: a carriage return does not end a line.
        *whole, begin = data.split(b"\n")
        for line in [*(part + b"\n" for part in whole), *([begin] if begin else [])]:
            since, begun = moment, b""
            if self._entries and not self._entries[-1][1].endswith(b"\n"):
                since, begun = self._entries.pop()
            rest = begun + line
            if rest.endswith(b"\r\n"):
                rest = rest[:-2] + b"\n"
            while len(rest.removesuffix(b"\n")) > ENTRY_BYTES:
                self._entries.append((since, rest[:ENTRY_BYTES]))
                since, rest = moment, rest[ENTRY_BYTES:]
            self._entries.append((since, rest))

    def times(self) -> list[float]:
        """Return the time of each entry; see ``Log``."""
        return [moment for moment, _ in self._entries]

    def entries(self, start: int, end: int) -> list[tuple[float, bytes]]:
        """Return some of the entries; see ``Log``."""
        return self._entries[start:end]
