"""What the sync in progress has cost."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class Traffic:
    """Counters of the sync in progress: payload bytes and seconds. Added to by whoever reads, writes or waits in it.

    Attributes:
        sent: Bytes written.
        received: Bytes read.
        waited: Seconds of waiting for others.
    """

    sent: int = 0
    received: int = 0
    waited: float = 0.0
    _counting: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def begin(self) -> None:
        """A sync begins."""
        self.sent = self.received = 0
        self.waited = 0.0

    def count_sent(self, size: int) -> None:
        """So many bytes were written. Thread-safe: several uploads may end at a time."""
        with self._counting:
            self.sent += size
