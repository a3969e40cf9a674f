"""How replicas learn that another one has ended: its beat stops, or it leaves a note that it has left or failed.

A beat holds no time, so clocks need not agree: by its own clock, the observer measures how long a beat has not changed. Time
in which the observer cannot reach the store does not count.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING

from .._errors import CorruptedObjectError, FormatError, ReplicaLostError, StoreError
from .._exchange._endings import Progress, conclude
from .._store._parallel import in_parallel
from .._store._reread import read_again
from ._records._records import beat_key, note, note_key, noted, read_note

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from .._exchange._endings import Ending
    from .._store._patient import Patient
    from .._timing import Timing
    from ._records._records import Claim

_log = logging.getLogger("diloco_core")

_NOTHING = Progress()
_RETRY_SECONDS = 1.0
_STOP_SECONDS = 5.0
_MOST_BEATS = 64
_READS_AT_ONCE = 16


class Liveness:
    """The beat and the note of one replica, and what it knows of the beats and notes of the others.

    To be used by one thread; another one writes the beat.

    Attributes:
        life: The life of this replica's rank. To be set before :meth:`start`, if it is not the first one.
    """

    def __init__(
        self, store: Patient, rank: int, world_size: int, timing: Timing, nonce: str
    ) -> None:
        self._store = store
        self._rank = rank
        self._nonce = nonce
        self._claims: dict[int, Claim] = {}
        self.life = 1
        self._world_size = world_size
        self._timing = timing
        # The last beat of each rank, and when it was first seen.
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._endings: dict[int, Ending] = {}
        self._unreadable: set[int] = set()
        self._foreign: set[int] = set()
        self._downtime = 0.0
        self._last_read = -1
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def know(self, claim: Claim) -> None:
        """Remember which process holds another rank. From now on, beats and notes of other processes for it are ignored.

        Such a process belongs to an earlier run: the prefix was emptied while the process was still running.
        """
        self._claims[claim.rank] = claim

    def start(self) -> None:
        """Begin to write the beat, from a daemon thread."""
        self._beat(0)
        self._thread = threading.Thread(
            target=self._run, name=f"diloco-beat-{self._rank}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop writing the beat; repeatable."""
        self._stop.set()
        if self._thread is not None:
            # Not without a limit: the thread may be waiting for a store that is unavailable. One more beat does no harm.
            self._thread.join(_STOP_SECONDS)
            self._thread = None

    def tell(self, ending: Ending) -> None:
        """Write the note that says how this replica ended."""
        key = note_key(self._rank, self.life)
        self._store.put(key, lambda: [note(ending, self._nonce, self.life)])

    def check(self, missing: Collection[int], progress: Progress, description: str) -> None:
        """Look for a reason why some ranks may never contribute.

        Args:
            missing: The ranks that this replica is waiting for.
            progress: How many syncs this replica has finished.
            description: What errors call the sync in which it waits for them.

        Raises:
            ReplicaLostError: A replica failed, or the beat of a missing one stopped.
            UnequalSyncsError: A missing rank left before this sync.
        """
        self.check_failures(missing, progress)
        now = self._now()
        ranks = self._ranks_to_read(missing)
        for rank, beat in zip(ranks, self._read_beats(ranks), strict=True):
            last_beat, since = self._seen.get(rank, (None, now))
            # A beat of a process of an earlier run is not a sign of life.
            of_this_run = self._is_of(rank, beat.partition(b" ")[0].decode("ascii", "replace"))
            if last_beat is None or (of_this_run and beat != last_beat):
                self._seen[rank] = (beat, now)
            elif now - since > self._silence(rank):
                damaged_note = (
                    " It has written a note of how it ended, but that note is damaged."
                    if rank in self._unreadable
                    else ""
                )
                raise ReplicaLostError(
                    f"rank {rank} has shown no sign of life for {now - since:.0f} s, so {description} cannot be completed. "
                    f"Its process or machine is gone, or it cannot reach the store: look at its logs.{damaged_note}",
                    rank,
                )

    def check_failures(self, missing: Collection[int] = (), progress: Progress = _NOTHING) -> None:
        """Read the notes of the other ranks.

        Raises:
            ReplicaLostError: A replica failed; the error names the one that failed first.
            UnequalSyncsError: One of the ``missing`` ranks left.
        """
        notes = noted(self._store.list("notes/"))
        ended = [
            rank
            for rank in range(self._world_size)
            if rank != self._rank
            and rank not in self._endings
            and (rank, self._life_of(rank)) in notes
        ]
        for _ in in_parallel(
            self._store.store, (partial(self._read_note, rank) for rank in ended), _READS_AT_ONCE
        ):
            pass
        error = conclude(self._endings, missing, self._rank, progress)
        if error is not None:
            raise error

    def ending(self, rank: int) -> Ending | None:
        """How another replica has ended; None if this is not known."""
        return self._endings.get(rank)

    def _read_note(self, rank: int) -> None:
        if rank in self._unreadable:
            return
        life = self._life_of(rank)
        key = note_key(rank, life)

        def read() -> tuple[Ending, str] | None:
            data = self._store.get(key)
            origin = f"{self._store.uri}/{key}"
            return None if data is None else read_note(data, rank, origin, life)

        try:
            note = read_again(self._timing, read)
        except (CorruptedObjectError, FormatError) as error:
            # The replica has ended, but how is not known. If it is still needed, its beat will show that it is gone.
            _log.error(
                "the note that says how rank %d ended cannot be read and is ignored: %s",
                rank,
                error,
            )
            self._unreadable.add(rank)
            return
        if note is None:
            return
        ending, nonce = note
        if self._is_of(rank, nonce):
            self._endings[rank] = ending
        elif rank not in self._foreign:
            self._foreign.add(rank)
            _log.error(
                "a note that says how rank %d ended is ignored, since a process of an earlier run has written it. That process "
                "is still running, although its prefix was emptied for this run: stop it.",
                rank,
            )

    def _is_of(self, rank: int, nonce: str) -> bool:
        """Whether a beat or a note with this nonce is of the process that holds the rank; True if that is not known yet."""
        return rank not in self._claims or self._claims[rank].nonce == nonce

    def _silence(self, rank: int) -> float:
        """Seconds without a changed beat after which a rank counts as lost. Its process may beat less often than this one."""
        lost_after = self._timing.lost_after
        return self._claims[rank].silence(lost_after) if rank in self._claims else lost_after

    def _life_of(self, rank: int) -> int:
        """The life of another rank whose beats and notes count.

        As long as it is not known: in a new run the first one, and in a run that is resumed 0, which no rank has. So a replica
        that resumes a run sees no note of another one before it has met it.
        """
        if rank in self._claims:
            return self._claims[rank].life
        return 1 if self.life == 1 else 0

    def _ranks_to_read(self, missing: Collection[int]) -> list[int]:
        """The missing ranks whose beats are read now: a limited number, the next ones each time.

        While beats are read, this replica does not notice that its wait is over.
        """
        ranks = sorted(missing)
        later_ranks = [rank for rank in ranks if rank > self._last_read]
        chosen = (later_ranks + ranks)[: min(_MOST_BEATS, len(ranks))]
        self._last_read = chosen[-1] if chosen else -1
        return chosen

    def _read_beats(self, ranks: Iterable[int]) -> Iterator[bytes]:
        return in_parallel(
            self._store.store, (partial(self._read_beat, rank) for rank in ranks), _READS_AT_ONCE
        )

    def _read_beat(self, rank: int) -> bytes:
        return self._store.peek(beat_key(rank, self._life_of(rank)), largest=64) or b""

    def _now(self) -> float:
        """The time by the clock of this replica, which stands still while it cannot reach the store."""
        downtime = self._store.downtime
        now = self._timing.clock() - downtime
        if downtime - self._downtime > self._timing.beat_interval:
            # The store was away for so long that beats were missed, and the others may not reach it yet: all of them get the
            # whole time again.
            self._seen = {rank: (beat, now) for rank, (beat, _) in self._seen.items()}
        self._downtime = downtime
        return now

    def _beat(self, count: int) -> None:
        key = beat_key(self._rank, self.life)
        self._store.put(key, lambda: [f"{self._nonce} {count}".encode()])

    def _run(self) -> None:
        count, pause = 0, self._timing.beat_interval
        while not self._stop.wait(pause):
            count += 1
            pause = self._timing.beat_interval
            try:
                self._beat(count)
            except (StoreError, OSError) as error:
                # Not fatal by itself: the next beat may succeed before the others count this replica as lost.
                _log.warning("rank %d could not write its beat: %s", self._rank, error)
                pause = min(pause, _RETRY_SECONDS)
