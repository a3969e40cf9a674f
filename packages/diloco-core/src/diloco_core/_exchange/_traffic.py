"""What the sync in progress has cost."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class Traffic:
    """Counters of the sync in progress: payload bytes and seconds. The code that reads, writes or waits adds to them.

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
        """Set all counters to 0, since a sync begins."""
        self.sent = self.received = 0
        self.waited = 0.0

    def count_sent(self, size: int) -> None:
        """Count bytes that were written. Thread-safe, since several uploads may end at the same time."""
        with self._counting:
            self.sent += size
