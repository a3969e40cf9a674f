"""Moves a cluster along in real time."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._kubernetes._control._cluster import Cluster


_LOG = logging.getLogger("diloco_localcloud")


class Ticker:
    """A thread that runs what is due, from ``start`` to ``stop``."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="cluster", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; what was still to come never does."""
        with self._cluster.changed:
            self._ending = True
            self._cluster.changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        timeline = self._cluster.timeline
        with self._cluster.changed:
            while not self._ending:
                try:
                    timeline.run_until(timeline.now())
                except Exception:  # noqa: BLE001 - one fault must not stop the clock
                    _LOG.exception("something that was due failed; the cluster goes on")
                due = timeline.next_due()
                self._cluster.changed.wait(None if due is None else max(0.0, due - timeline.now()))
