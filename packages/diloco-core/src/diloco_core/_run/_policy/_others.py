"""The handling of ranks that an incarnation of a fixed run waits for.

It reports what became of them, and gives them up in the end.

A *beat* is a sign of life: a counter that each replica writes again and again, and the others
watch. It holds no time, so clocks need not agree: by its own clock, the observer measures how long
a beat has not changed. Time in which the observer cannot reach the store does not count.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from ..._errors import CorruptedObjectError, MismatchError
from ..._exchange._base import Schema
from ..._exchange._schemas import MAY_CHANGE, compare_schemas
from ..._retry import NOTICE_SECONDS
from ..._store._api import Store
from ..._store._patient import Patient
from ..._store._reread import in_parallel
from ..._timing import Timing
from .._claims import claimed_settings, incarnation_is_gone, newest_epoch
from .._incarnation._incarnation import Incarnation
from .._records._attendance import Farewell, concluded, read_farewell
from .._records._keys import Delta, Hint, beat_key, farewells, schema
from ._ends import give_up

_LARGEST = 128
_MOST_BEATS = 64
_READS_AT_ONCE = 16
_BY_LAUNCHER = "Its launcher, or 'diloco status', says whether it is started again"
_BY_HAND = "If nothing starts it again, do that by hand, or end this replica with Ctrl-C"


def read_beats(store: Patient, ranks: Iterable[int]) -> list[bytes]:
    """Read the last beats of some ranks.

    A beat is empty where there is none, or something that is too large for one.
    """

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


def _epoch_of(beat: bytes) -> int:
    """The epoch of the incarnation that gave a beat; 0 if it names none."""
    last = beat.split(b" ")[2:3]
    return int(last[0]) if last and last[0].isdigit() else 0


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
        """Return the ranks whose beat has not changed for ``lost_after``, with the seconds since.

        A process that ran on this machine and is gone counts at the second beat that it misses.
        """
        now, seconds_since = self._now(), {}
        read = self._to_read(ranks)
        for rank, beat in zip(read, read_beats(self._store, read), strict=True):
            last, since = self._seen.get(rank, (None, now))
            interval = min(interval_of(beat), self._timing.sync_timeout)
            seconds = now - since
            if last is None or (beat != last and beat.startswith(f"{self._run} ".encode())):
                self._seen[rank] = beat, now
            elif seconds > 2 * interval and (
                seconds > self._timing.lost_after
                or incarnation_is_gone(self._store, rank, _epoch_of(last))
            ):
                seconds_since[rank] = seconds
        return seconds_since

    def _to_read(self, ranks: Iterable[int]) -> list[int]:
        """Choose a limited number of ranks, the next ones each time.

        While beats are read, this replica does not notice that its wait is over.
        """
        ordered = sorted(ranks)
        later = [rank for rank in ordered if rank > self._last_read]
        chosen = (later + ordered)[: min(_MOST_BEATS, len(ordered))]
        self._last_read = chosen[-1] if chosen else -1
        return chosen

    def _now(self) -> float:
        """Return this replica's time, which stands still while it cannot reach the store."""
        downtime = self._store.downtime
        now = self._timing.clock() - downtime
        if downtime - self._downtime > self._timing.beat_interval:
            # The store was away so long that beats were missed: all ranks get the whole time again.
            self._seen = {rank: (beat, now) for rank, (beat, _) in self._seen.items()}
        self._downtime = downtime
        return now

    def _beat(self) -> None:
        beat = f"{self._run} {self._timing.beat_interval} {self._identity} {next(self._count)}"
        self._store.put(beat_key(self._rank), lambda: [beat.encode()])


class _Gone(NamedTuple):
    """What an incarnation knows about a rank that is gone.

    Attributes:
        epoch: The incarnation of that rank; 0 if it is not known.
        lost: The rank that was lost first, if that is why this one has failed; otherwise the same.
        why: What became of it, as a sentence.
        final: Whether nothing starts it again, so that it is of no use to wait.
        since: When this was first known.
    """

    epoch: int
    lost: int
    why: str
    final: bool = False
    since: float = 0.0


class Others:
    """What one incarnation knows of the other ranks while it waits for them. Not thread-safe.

    Args:
        beats: Their signs of life.
        settings: What this incarnation was started with, of the settings that may change when the
            run is resumed.
        earlier: In an incarnation that continues the run: the highest epochs of all ranks before
            its own claim, which others follow.
    """

    def __init__(
        self, beats: Beats, settings: Mapping[str, str], earlier: Mapping[int, int]
    ) -> None:
        self._earlier = earlier
        self._settings = settings
        self._compared: set[tuple[int, int]] = set()
        self._beats = beats
        self._gone: dict[int, _Gone] = {}
        self._said: dict[int, float] = {}
        self._endings: dict[str, Farewell] = {}

    def compare(self, incarnation: Incarnation, contributions: Iterable[Delta]) -> None:
        """Refuse to go on with ranks that were started with other settings than this incarnation.

        Each of their incarnations is asked once.

        Raises:
            MismatchError: A rank has other settings.
        """
        for delta in contributions:
            if (delta.rank, delta.epoch) in self._compared or delta.rank == incarnation.rank:
                continue
            self._compared.add((delta.rank, delta.epoch))
            settings = claimed_settings(incarnation.store, delta.rank, delta.epoch)
            if settings is not None:
                own, theirs = Schema({}, self._settings), Schema({}, settings)
                compare_schemas(f"rank {incarnation.rank}", own, f"rank {delta.rank}", theirs)

    def compare_means(
        self, incarnation: Incarnation, missing: Collection[int], listing: Iterable[str]
    ) -> None:
        """Refuse to wait for a rank whose tensors for a plain mean differ from this incarnation's.

        Raises:
            MismatchError: A rank has.
        """
        if not incarnation.takes_means:
            return
        (progress,) = incarnation.fragments
        layout = schema(incarnation.run, progress.job)
        for delta in filter(None, map(Delta.parse, listing)):
            # Its base is that of this run, so it is no process of an earlier one that wakes up.
            if delta.rank in missing and delta.base == progress.digest and delta.schema != layout:
                raise MismatchError(
                    f"in mean {delta.sync}, rank {delta.rank} contributes other tensors than rank "
                    f"{incarnation.rank}: all replicas must sync the same tensors, with the same "
                    "shapes and dtypes, in the same order"
                )

    def is_past(self, hint: Hint) -> bool:
        """Say whether an incarnation ended before this one began to continue the run.

        Others come in its place.
        """
        return 0 < hint.epoch <= self._earlier.get(hint.rank, 0)

    def stop(self) -> None:
        """Give no more signs of life; repeatable."""
        self._beats.stop()

    def check(
        self,
        incarnation: Incarnation,
        missing: Collection[int],
        sync: int,
        listing: Iterable[str],
        *,
        final: bool = False,
    ) -> bool:
        """Look for reasons why some ranks may never do their part.

        Args:
            incarnation: This incarnation.
            missing: The ranks that it waits for.
            sync: The next sync that is not decided.
            listing: The keys in the folder of that sync.
            final: Whether this incarnation waits no longer (``sync_timeout``), not even for ranks
                that may still come back.

        Returns:
            Whether the log holds a record at that number by now, which may be an end.

        Raises:
            UnequalSyncsError: A missing rank has left.
            MismatchError: A missing rank has passed other tensors to a plain mean.
            FencedError: A newer incarnation of this replica's own rank has taken over.
        """
        self.compare_means(incarnation, missing, listing)
        self._gone = {rank: gone for rank, gone in self._gone.items() if rank in missing}
        ended = self._ended(incarnation, missing, sync, listing)
        left = [rank for rank in missing if rank not in ended]
        for rank, seconds in self._beats.silent(left).items():
            why = f"rank {rank} has shown no sign of life for {seconds:.0f} s"
            ended[rank] = _Gone(0, rank, why)
        for rank in [rank for rank in self._gone if rank not in ended]:
            incarnation.say.info("rank %d gives signs of life again", rank)
            del self._gone[rank]
        # First those whose failure no other rank has caused. A list, so that all are considered.
        ordered = sorted(ended.items(), key=lambda item: (item[1].lost != item[0], item[0]))
        done = [self._consider(incarnation, rank, gone, sync, final) for rank, gone in ordered]
        return any(done)

    def _ended(
        self, incarnation: Incarnation, missing: Collection[int], sync: int, listing: Iterable[str]
    ) -> dict[int, _Gone]:
        """The missing ranks that have said that they have failed."""
        newest_last = sorted(farewells(listing), key=lambda hint: hint.epoch)
        hints = {hint.rank: hint for hint in newest_last}
        gone: dict[int, _Gone] = {}
        for rank, hint in hints.items():
            is_past = incarnation.settings.resume and self.is_past(hint)
            if rank not in missing or is_past or newest_epoch(incarnation.store, rank) > hint.epoch:
                continue
            if hint.key not in self._endings:
                self._endings[hint.key] = read_farewell(hint.key, incarnation.store.peek)
            record = self._endings[hint.key]
            lost, why = concluded(incarnation.rank, rank, record, sync - 1)
            gone[rank] = _Gone(hint.epoch, lost, why, record.final)
        return gone

    def _consider(
        self, incarnation: Incarnation, rank: int, news: _Gone, sync: int, final: bool
    ) -> bool:
        now, why, most = incarnation.now, news.why, incarnation.timing.sync_timeout
        gone = self._gone.get(rank)
        if gone is None or gone.epoch < news.epoch:  # or it came back, and has failed again
            epoch = news.epoch or newest_epoch(incarnation.store, rank)
            gone = self._gone[rank] = _Gone(epoch, news.lost, why, news.final, now)
            self._said.pop(rank, None)
        patience = 0.0 if gone.final else incarnation.settings.return_within
        left = gone.since + patience - now
        if left > 0 and not final:
            if now - self._said.get(rank, -NOTICE_SECONDS) >= NOTICE_SECONDS:
                self._said[rank] = now
                incarnation.say.warning(
                    "%s. Waiting up to %.0f s for it to be started again (%s). If it is not back "
                    "by then, this run ends. %s.",
                    why,
                    *min((left, "return_within"), (gone.since + most - now, "sync_timeout")),
                    _BY_LAUNCHER if os.environ.get("DILOCO_BACKEND") else _BY_HAND,
                )
            return False
        ended = give_up(incarnation, rank, gone.epoch, why, sync, news.lost)
        if not ended:
            # A newer incarnation of it that is gone, too, has the whole time again.
            del self._gone[rank]
        return ended


def changeable(settings: Mapping[str, str]) -> dict[str, str]:
    """Return those of a replica's settings that may change when a run is resumed.

    All ranks have to change them in the same way.
    """
    names = sorted(MAY_CHANGE.intersection(settings) - {"committed", "init"})
    return {name: settings[name] for name in names}
