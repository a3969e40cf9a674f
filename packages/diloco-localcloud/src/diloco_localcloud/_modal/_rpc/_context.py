"""What is known of a request besides its message."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Context:
    """Of one request.

    Attributes:
        key: the same for all attempts at one call (``x-idempotency-key``).
        task_id: the container that asks; empty for a client.
    """

    key: str = ""
    task_id: str = ""


class Bell:
    """Wakes those on an event loop who wait for a change that another thread makes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()
        self._lock = threading.Lock()
        self._open = True

    @property
    def next(self) -> asyncio.Event:
        """Set at the next ring; to be fetched before it is looked whether there is anything to wait for."""
        return self._event

    def ring(self) -> None:
        """Something has changed; from any thread."""
        with self._lock:
            if self._open:
                self._loop.call_soon_threadsafe(self._ring)

    def close(self) -> None:
        """The loop ends."""
        with self._lock:
            self._open = False

    def _ring(self) -> None:
        rung, self._event = self._event, asyncio.Event()
        rung.set()


async def wait(event: asyncio.Event, seconds: float) -> bool:
    """Whether an event is set within so many seconds of the wall's clock."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
