"""The facts about a request besides its message."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._workspace._workspace import Workspace


@dataclass(frozen=True)
class Context:
    """The context of one request.

    Attributes:
        key: the same for all attempts at one call (``x-idempotency-key``).
        task_id: the container that sent it; empty for a client.
    """

    key: str = ""
    task_id: str = ""


class Bell:
    """Wakes the coroutines of an event loop that wait for a change by another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()
        self._lock = threading.Lock()
        self._open = True

    @property
    def next(self) -> asyncio.Event:
        """Return the event that the next ring sets.

        Fetch it before you look whether there is anything to wait for.
        """
        return self._event

    def ring(self) -> None:
        """Wake all that wait, since something has changed; may be called from any thread."""
        with self._lock:
            if self._open:
                self._loop.call_soon_threadsafe(self._ring)

    def close(self) -> None:
        """Ring no more, since the loop ends."""
        with self._lock:
            self._open = False

    def _ring(self) -> None:
        rung, self._event = self._event, asyncio.Event()
        rung.set()


class Rpcs:
    """RPCs of one kind, each with a method: ``_serve_function_map`` serves ``FunctionMap``.

    A method is called under the lock of the workspace; a coroutine or an async generator, whose
    items are sent one by one, takes it itself.
    """

    def __init__(self, workspace: Workspace, bell: Bell) -> None:
        self._workspace = workspace
        self._bell = bell

    async def _until(self, seconds: float, look: Callable[[], Any]) -> Any:
        """Return what ``look`` returns once that is not None; None after seconds of real time.

        ``look`` is called under the lock of the workspace.
        """
        end = time.monotonic() + seconds
        while True:
            event = self._bell.next
            with self._workspace.lock:
                answer = look()
            left = end - time.monotonic()
            if answer is not None or left <= 0:
                return answer
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), left)
