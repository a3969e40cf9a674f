"""A log that a test writes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class MemoryLog:
    """Kept in memory, line by line."""

    entries: list[tuple[float, bytes]] = field(default_factory=list)
    ended: bool = False

    def write(self, moment: float, text: str | bytes) -> None:
        """Add text; one line is one entry, and text without a newline stays open."""
        data = text.encode() if isinstance(text, str) else text
        # At newlines only, as the container runtime does: a carriage return does not end a line.
        *whole, rest = data.split(b"\n")
        for line in [*(part + b"\n" for part in whole), *([rest] if rest else [])]:
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
