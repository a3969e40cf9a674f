"""Signs of life of the replicas of a fixed run: a counter that each of them writes again and again, and the others watch.

A beat holds no time, so clocks need not agree: by its own clock, the observer measures how long a beat has not changed. Time in
which the observer cannot reach the store does not count.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError
from ..._store._ahead import in_parallel
from ..._store._patient import Patient
from .._records._keys import beat_key

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from ..._store._api import Store
    from ..._timing import Timing

_LARGEST = 128
_MOST_BEATS = 64
_READS_AT_ONCE = 16


def read_beats(store: Patient, ranks: Iterable[int]) -> list[bytes]:
    """The last beats of some ranks; empty where there is none, or something that is too large for one."""

    def read(rank: int) -> bytes:
        try:
            return store.get(beat_key(rank), _LARGEST) or b""
        except CorruptedObjectError:
            return b""

    return list(in_parallel(store.store, (partial(read, rank) for rank in ranks), _READS_AT_ONCE))


def interval_of(beat: bytes) -> float:
    """The seconds to the next beat that a beat names; 0 if it names none."""
    try:
        return float(beat.split(b" ")[1])
    except (IndexError, ValueError):
        return 0.0


class Beats:
    """Writes the beat of one incarnation, and reads those of others.

    To be used by one thread; another one writes the beat.

    Args:
        store: The run's prefix.
        rank: The rank.
        identity: The run and the epoch of this incarnation: what its beats begin with.
        run: Name of the run. Beats of other runs are no signs of life.
        timing: Limits and clock.
    """

    def __init__(self, store: Store, rank: int, identity: str, run: str, timing: Timing) -> None:
        # Not the store of the syncs: what that checks before it writes is for one thread.
        self._store = Patient(store, timing)
        self._rank = rank
        self._identity = identity
        self._run = run
        self._timing = timing
        self._count = itertools.count()
        self._stop: Callable[[], None] = bool  # type: ignore[assignment]
        self._seen: dict[int, tuple[bytes, float]] = {}  # the last beat, and when it was first seen
        self._downtime = 0.0
        self._last_read = -1

    def start(self) -> None:
        """Begin to write the beat, in the background."""
        self._beat()
        failure = f"rank {self._rank} could not write its beat"
        self._stop = self._store.repeat(self._timing.beat_interval, self._beat, failure)

    def stop(self) -> None:
        """Stop writing the beat; repeatable."""
        self._stop()

    def silent(self, ranks: Collection[int]) -> dict[int, float]:
        """Those of some ranks whose beat has not changed for ``lost_after``, with the seconds since it has."""
        now, found = self._now(), {}
        read = self._to_read(ranks)
        for rank, beat in zip(read, read_beats(self._store, read), strict=True):
            last, since = self._seen.get(rank, (None, now))
            interval = min(interval_of(beat), self._timing.sync_timeout)
            if last is None or (beat != last and beat.startswith(f"{self._run} ".encode())):
                self._seen[rank] = beat, now
            elif now - since > max(self._timing.lost_after, 2 * interval):
                found[rank] = now - since
        return found

    def _to_read(self, ranks: Iterable[int]) -> list[int]:
        """A limited number, the next ones each time: while beats are read, this replica does not notice that its wait is over."""
        ordered = sorted(ranks)
        later = [rank for rank in ordered if rank > self._last_read]
        chosen = (later + ordered)[: min(_MOST_BEATS, len(ordered))]
        self._last_read = chosen[-1] if chosen else -1
        return chosen

    def _now(self) -> float:
        """The time by the clock of this replica, which stands still while it cannot reach the store."""
        downtime = self._store.downtime
        now = self._timing.clock() - downtime
        if downtime - self._downtime > self._timing.beat_interval:
            # The store was away for so long that beats were missed: all ranks get the whole time again.
            self._seen = {rank: (beat, now) for rank, (beat, _) in self._seen.items()}
        self._downtime = downtime
        return now

    def _beat(self) -> None:
        beat = f"{self._run} {self._timing.beat_interval} {self._identity} {next(self._count)}"
        self._store.put(beat_key(self._rank), lambda: [beat.encode()])
