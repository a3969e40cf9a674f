"""A sync under way: in a thread of its own while its replica trains, or at once while the replica waits for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .._exchange._report import SyncReport

_STOP_SECONDS = 5.0


class Flight:
    """One sync from its beginning to its result. Used by the thread that trains.

    Args:
        run: Carries out the sync.
        clock: A clock in seconds.

    Attributes:
        seconds: How long the sync took; 0 as long as it goes on.
    """

    def __init__(self, run: Callable[[], SyncReport], clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._run = run
        self._clock = clock
        self._report: SyncReport | None = None
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start_behind(self) -> None:
        """Carry the sync out in a thread of its own."""
        # A daemon: a process whose user gives up must not hang at its end because a store does not answer.
        self._thread = threading.Thread(target=self._act, name="diloco-sync", daemon=True)
        self._thread.start()

    def result(self) -> SyncReport:
        """Wait for the result; carry the sync out now if :meth:`start_behind` was not called. Repeatable.

        Raises:
            SyncError: The sync has failed.
        """
        if self._thread is not None:
            self._over.wait()
            self._raise()
        elif self._report is None:
            self._report = self._timed()
        assert self._report is not None
        return self._report

    def check(self) -> None:
        """Raise the error of a sync that has failed by now. Does not wait."""
        if self._over.is_set():
            self._raise()

    def stop(self, give_up: Callable[[], None]) -> None:
        """End a sync whose result is not wanted any more.

        Returns when its thread has ended, but after five seconds at most: it may be in a request that takes long.

        Args:
            give_up: Makes the waits of the sync end with an error.
        """
        if self._thread is not None and not self._over.is_set():
            give_up()
            self._thread.join(_STOP_SECONDS)

    @property
    def succeeded(self) -> bool:
        """Whether the result is there."""
        return self._report is not None

    @property
    def over(self) -> bool:
        """Whether no thread works on the sync any more."""
        return self._thread is None or self._over.is_set()

    def _act(self) -> None:
        try:
            self._report = self._timed()
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that trains
            self._error = error
        self._over.set()

    def _timed(self) -> SyncReport:
        start = self._clock()
        try:
            return self._run()
        finally:
            self.seconds = self._clock() - start

    def _raise(self) -> None:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # it would keep many frames in memory
