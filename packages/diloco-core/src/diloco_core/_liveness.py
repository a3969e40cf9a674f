"""How replicas learn of each other's end: beats that stop, and notes of those that left or failed.

A beat carries no time, so clocks need not agree: the observer measures with its own clock since it last saw a change.
"""

from __future__ import annotations

import json
import logging
import threading
from typing import TYPE_CHECKING, Any

from ._errors import ObjectNotFoundError, ReplicaLostError, StoreError, UnequalSyncsError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ._store import Store
    from ._timing import Timing

_log = logging.getLogger("diloco_core")


class Liveness:
    """Beats and notes of one replica, and what it knows of the others'. One observer thread; the beat has its own."""

    def __init__(self, store: Store, rank: int, timing: Timing) -> None:
        self._store = store
        self._rank = rank
        self._timing = timing
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to beat, from a daemon thread."""
        self._beat(0)
        self._thread = threading.Thread(target=self._run, name=f"diloco-beat-{self._rank}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the beat; repeatable."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def note(self, event: str, syncs: int, message: str = "") -> None:
        """Leave a note that this replica has ``left`` or ``failed`` after so many syncs."""
        text = json.dumps({"event": event, "syncs": syncs, "message": message})
        self._store.put(f"notes/{self._rank:05}.json", [text.encode()])

    def check(self, missing: Iterable[int], sync: int) -> None:
        """Look for a reason why some ranks may never come.

        Raises:
            ReplicaLostError: One of them failed, or its beat stopped.
            UnequalSyncsError: One of them left before this sync.
        """
        missing = sorted(missing)
        for rank, note in self.check_failures().items():
            if note["event"] == "left" and rank in missing:
                raise UnequalSyncsError(
                    f"rank {rank} has finished after {note['syncs']} syncs, but this replica (rank {self._rank}) is in sync "
                    f"number {sync}, counted from 0. All replicas must take the same number of inner steps.",
                    rank,
                )
        now = self._timing.clock()
        for rank in missing:
            try:
                beat = self._store.get(f"beats/{rank:05}")
            except ObjectNotFoundError:
                beat = b""
            last, since = self._seen.get(rank, (None, now))
            if beat != last:
                self._seen[rank] = (beat, now)
            elif now - since > self._timing.lost_after:
                raise ReplicaLostError(
                    f"rank {rank} has shown no sign of life for {now - since:.0f} s, so sync {sync} cannot be completed. "
                    "Its process or machine is gone, or it cannot reach the store: look at its logs.",
                    rank,
                )

    def check_failures(self) -> dict[int, dict[str, Any]]:
        """Read the notes of the other ranks.

        Raises:
            ReplicaLostError: One of them failed.
        """
        notes: dict[int, dict[str, Any]] = {}
        for key in self._store.list("notes/"):
            rank = int(key.removeprefix("notes/").removesuffix(".json"))
            if rank != self._rank:
                note = notes[rank] = json.loads(self._store.get(key))
                if note["event"] == "failed":
                    raise ReplicaLostError(f"rank {rank} failed after {note['syncs']} syncs: {note['message']}", rank)
        return notes

    def _beat(self, count: int) -> None:
        self._store.put(f"beats/{self._rank:05}", [str(count).encode()])

    def _run(self) -> None:
        count = 0
        while not self._stop.wait(self._timing.beat_interval):
            count += 1
            try:
                self._beat(count)
            except (StoreError, OSError) as error:
                # Not fatal by itself: the next beat may get through before the others give this replica up.
                _log.warning("rank %d could not write its beat: %s", self._rank, error)
