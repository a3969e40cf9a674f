"""Which ranks take part in a run, as far as one incarnation has heard, and how others have ended.

An incarnation writes when it ends: that it leaves, or why it has failed. That it ends follows from
the key alone (see :class:`._keys.Hint`). Whether nothing starts it again shortens the time for
which the others wait. All else here is used only for log messages and errors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal, NamedTuple

from ..._errors import CorruptedObjectError, FormatError, ReplicaLostError, UnequalSyncsError
from ..._exchange._endings import Ending, Progress, as_text, cause_of, conclude
from ..._redact import redact
from ..._wire._sealed import seal, unsealed_fields
from ._keys import Delta, Hint
from ._records import Commit

_LONGEST = 1000


class Farewell(NamedTuple):
    """How an incarnation has ended.

    Attributes:
        event: ``left``, ``failed``, or ``left or failed`` if its hint cannot be read.
        reason: Why it has failed.
        cause: The rank of the replica that caused its failure, if it was another one.
        final: Whether nothing starts its replica again, as far as it knew.
    """

    event: str
    reason: str = ""
    cause: int | None = None
    final: bool = False


def farewell(
    key: str, error: BaseException | None, rank: int | None = None, *, final: bool = False
) -> bytes:
    """Return the content of the hint that says how an incarnation of a rank has ended.

    It has left the run if ``error`` is None; otherwise it has failed with this error. It is final
    if nothing starts the replica again.
    """
    if error is None:
        return seal("farewell", key, {"event": "left", "reason": ""})
    fields = {"event": "failed", "reason": redact(as_text(error))[:_LONGEST]}
    if final:
        fields["final"] = "yes"
    cause = cause_of(rank, error)
    return seal("farewell", key, fields if cause is None else {**fields, "cause": cause})


def read_farewell(key: str, read: Callable[[str], bytes | None]) -> Farewell:
    """Return how an incarnation has ended, as its hint says."""
    try:
        data = read(key)
        if data is not None:
            fields = unsealed_fields("farewell", key, data, key)
            cause = fields.whole("cause", 0, 99999) if "cause" in fields.names() else None
            reason = " ".join(fields.text("reason")[:_LONGEST].split())
            event, final = fields.text("event", "left|failed"), "final" in fields.names()
            return Farewell(event, reason, cause, final)
    except (CorruptedObjectError, FormatError):
        # The key says that it has ended. Lost is the reason, and that no rank need wait for it.
        pass
    return Farewell("left or failed")


def concluded(own_rank: int, rank: int, record: Farewell, syncs: int) -> tuple[int, str]:
    """Of a fixed run: the rank that was lost first, and a sentence about it.

    Args:
        own_rank: The rank of the replica that waits.
        rank: The rank that has ended, and is waited for.
        record: How it has ended.
        syncs: How many syncs were taken before.

    Raises:
        UnequalSyncsError: It has left.
    """
    progress = Progress(syncs, syncs)
    if record.event == "left or failed":
        return rank, f"rank {rank} has {record.event} after {progress}"
    event: Literal["left", "failed"] = "left" if record.event == "left" else "failed"
    ending = Ending(rank, event, progress, record.reason, record.cause)
    error = conclude({rank: ending}, [rank], own_rank, progress)
    if isinstance(error, UnequalSyncsError):
        raise error
    assert isinstance(error, ReplicaLostError)
    return error.rank, str(error)


class Attendance:
    """What one incarnation has heard from the other ranks.

    Times are seconds of a clock that stops while the store cannot be reached.

    Args:
        rank: The rank of the incarnation.
        read: Returns the object under a key; None if there is none.
    """

    def __init__(self, rank: int, read: Callable[[str], bytes | None]) -> None:
        self._rank = rank
        self._read = read
        self._began = 0.0
        # Ranks that are expected to take part, with their epochs.
        self._present: dict[int, int] = {}
        self._gone: set[int] = set()  # ranks that took part, and have left or were lost
        self._left: dict[int, Hint] = {}  # for every rank that left, the hint of its highest epoch
        self._endings: dict[Hint, Farewell] = {}  # how and why incarnations have ended
        self._heard: dict[int, float] = {}  # when something new from a rank was last seen
        self._seen: set[str] = set()  # keys of the sync in progress
        # Ranks that have contributed to the sync in progress, even if late or from another state.
        self._came: set[int] = set()
        # Ranks that have been in a sync since this incarnation began, with their epochs then.
        self._known: dict[int, int] = {}
        self._warned: set[tuple[int, int]] = set()  # ranks and epochs whose absence was logged

    def begin(self, members: Mapping[int, int], now: float) -> None:
        """Set which ranks the incarnation expects, with their epochs, when it begins."""
        self._began = now
        self._present = {rank: epoch for rank, epoch in members.items() if rank != self._rank}

    def look(self, listing: Iterable[str], now: float) -> None:
        """Take note of the keys in the folder of the sync in progress."""
        for key in listing:
            if key in self._seen:
                continue
            self._seen.add(key)
            if (hint := Hint.parse(key)) is not None:
                if hint.event != "leave":
                    self._hear(hint.rank, hint.epoch, now)
                elif hint.rank != self._rank:
                    self._heard[hint.rank] = now
                    if hint.epoch >= self._left_in(hint.rank):
                        self._left[hint.rank] = hint
            elif (delta := Delta.parse(key)) is not None:
                self._hear(delta.rank, delta.epoch, now)
                self._came.add(delta.rank)

    def committed(
        self, commit: Commit, listing: Callable[[], Iterable[str]], now: float
    ) -> list[tuple[int, str]]:
        """Return levels and texts of what to log when a sync is decided.

        They say which ranks are not in it, and which are in it again.

        Args:
            commit: The record of the sync.
            listing: Lists the sync's folder; called only if a rank is missing.
            now: The time.
        """
        self.look((member.key for member in commit.members), now)
        members = {member.rank: member.epoch for member in commit.members}
        messages = []
        for rank, epoch in members.items():
            if rank in self._gone or epoch > self._known.get(rank, epoch):
                what = f"rank {rank} {'is back' if rank in self._known else 'has joined'}"
                text = f"{what}: it takes part in sync {commit.sync}, as incarnation {epoch}"
                messages.append((logging.INFO, text))
        self._gone -= members.keys()
        self._known |= members
        missing = sorted(self._present.keys() - members.keys())
        # A rank that was itself left out cannot tell which other ranks were late.
        if missing and self._rank in members:
            self.look(listing(), now)
            absent = [rank for rank in missing if rank not in self._came]
            messages += [self._missed(rank, commit.sync, now) for rank in absent]
        self._seen.clear()
        self._came.clear()
        return messages

    def describe(
        self,
        ranks: Iterable[int],
        incarnations: Mapping[int, int],
        elsewhere: Collection[int],
        now: float,
    ) -> str:
        """A text on what is known about ranks that have not contributed.

        Args:
            ranks: These ranks.
            incarnations: The highest claimed epoch of every rank that has ever started.
            elsewhere: Ranks that have contributed from another state.
            now: The time.
        """
        kinds: dict[str, list[str]] = {}
        for rank in ranks:
            if rank not in incarnations:
                kind, text = "never started", f"{rank}"
            elif rank in elsewhere:
                kind, text = "contributed from another state", f"{rank}"
            elif self._left_in(rank) >= incarnations[rank]:
                kind, why = self._ending(rank)[:2]
                text = f"{rank} ({why})" if why else f"{rank}"
            else:
                kind, text = "silent", f"{rank} ({self._silence(rank, now)})"
            kinds.setdefault(kind, []).append(text)
        return "; ".join(f"{kind}: rank {', '.join(kinds[kind])}" for kind in sorted(kinds))

    def _hear(self, rank: int, epoch: int, now: float) -> None:
        """Note that an incarnation has been heard from."""
        if rank != self._rank:
            self._heard[rank] = now
            self._present[rank] = max(epoch, self._present.get(rank, 0))

    def _missed(self, rank: int, sync: int, now: float) -> tuple[int, str]:
        """Level and text of what to log about a rank that is not in a sync."""
        epoch = self._present.pop(rank)
        self._gone.add(rank)
        if self._left_in(rank) >= epoch:
            kind, why = self._ending(rank)[:2]
            text = f"rank {rank} has {kind}: sync {sync} goes on without it"
            if kind == "failed":
                return logging.WARNING, f"{text}. Its error: {why}"
            return logging.INFO, text
        level = logging.INFO if (rank, epoch) in self._warned else logging.WARNING
        self._warned.add((rank, epoch))
        silence = f"which has not contributed in time ({self._silence(rank, now)})"
        return level, f"sync {sync} goes on without rank {rank}, {silence}"

    def _left_in(self, rank: int) -> int:
        """The highest epoch in which a rank has said that it is leaving; -1 if it has not."""
        return self._left[rank].epoch if rank in self._left else -1

    def _ending(self, rank: int) -> Farewell:
        """Return how a rank that has said that it is leaving has ended, and why."""
        hint = self._left[rank]
        if hint not in self._endings:
            self._endings[hint] = read_farewell(hint.key, self._read)
        return self._endings[hint]

    def _silence(self, rank: int, now: float) -> str:
        if rank in self._heard:
            return f"last heard from {now - self._heard[rank]:.1f} s ago"
        return f"not heard from since this replica began, {now - self._began:.1f} s ago"
