"""A thread that moves a timeline along in real time."""

from __future__ import annotations

import logging
import threading

from ._timeline import Timeline

_LOG = logging.getLogger("diloco_localcloud")


class Ticker:
    """A thread that runs what is due, from ``start`` to ``stop``.

    Args:
        timeline: a timeline on the wall clock.
        changed: the lock that guards the timeline, notified whenever something may have been added
            to it.
    """

    def __init__(self, timeline: Timeline, changed: threading.Condition) -> None:
        self._timeline = timeline
        self._changed = changed
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; actions that are not due yet never run."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        timeline = self._timeline
        with self._changed:
            while not self._ending:
                try:
                    timeline.run_until(timeline.now())
                except Exception:  # noqa: BLE001 - one fault must not stop the clock
                    _LOG.exception("something that was due failed; the stand-in goes on")
                due = timeline.next_due()
                self._changed.wait(None if due is None else max(0.0, due - timeline.now()))
