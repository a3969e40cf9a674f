"""What one life of a fixed run does about ranks that it waits for: reports what became of them, and gives them up in the end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from ..._errors import MismatchError, UnequalSyncsError
from ..._exchange._base import Schema
from ..._exchange._schemas import MAY_CHANGE, compare_schemas
from ..._retry import NOTICE_SECONDS
from .._claims import claimed_settings
from .._records._farewell import read_farewell
from .._records._keys import Delta, Hint, epochs
from ._ends import give_up

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from .._life._life import Life
    from ._beats import Beats

_log = logging.getLogger("diloco_core")


class _Gone(NamedTuple):
    """What a life knows about a rank that is gone.

    Attributes:
        epoch: The life of that rank.
        why: What became of it, as a sentence.
        since: When this was first known.
    """

    epoch: int
    why: str
    since: float


class Others:
    """What one life knows of the other ranks while it waits for them. Not thread-safe.

    Args:
        beats: Their signs of life.
        settings: What this life was started with, of the settings that may change when the run is resumed.
    """

    def __init__(self, beats: Beats, settings: Mapping[str, str]) -> None:
        self._settings = settings
        self._compared: set[tuple[int, int]] = set()
        self._beats = beats
        self._gone: dict[int, _Gone] = {}
        self._said: dict[int, float] = {}
        self._endings: dict[str, tuple[str, str]] = {}

    def compare(self, life: Life, contributions: Iterable[Delta]) -> None:
        """Refuse to go on with ranks that were started with other settings than this life. Each of their lives is asked once.

        Raises:
            MismatchError: A rank has other settings.
        """
        for delta in contributions:
            if (delta.rank, delta.epoch) in self._compared or delta.rank == life.rank:
                continue
            self._compared.add((delta.rank, delta.epoch))
            theirs = claimed_settings(life.store, delta.rank, delta.epoch)
            if theirs is not None:
                compare_schemas(
                    f"rank {life.rank}",
                    Schema({}, self._settings),
                    f"rank {delta.rank}",
                    Schema({}, theirs),
                )

    def compare_means(self, life: Life, missing: Collection[int], listing: Iterable[str]) -> None:
        """Refuse to wait for a rank that has passed other tensors to a plain mean than this life.

        Raises:
            MismatchError: A rank has.
        """
        for delta in filter(None, map(Delta.parse, listing)):
            if delta.rank in missing and life.takes_means:
                raise MismatchError(
                    f"rank {delta.rank} takes the mean of other tensors in sync {delta.sync} than rank {life.rank}: all replicas "
                    "have to pass as many tensors, of the same shapes and dtypes"
                )

    def stop(self) -> None:
        """Give no more signs of life; repeatable."""
        self._beats.stop()

    def check(
        self, life: Life, missing: Collection[int], sync: int, listing: Iterable[str]
    ) -> bool:
        """Look for reasons why some ranks may never do their part.

        Args:
            life: This life.
            missing: The ranks that it waits for.
            sync: The next sync that is not decided.
            listing: The keys in the folder of that sync.

        Returns:
            Whether the log holds a record at that number by now, which may be an end.

        Raises:
            UnequalSyncsError: A missing rank has left.
            MismatchError: A missing rank has passed other tensors to a plain mean.
            FencedError: A newer life of this life's own rank has taken over.
        """
        self.compare_means(life, missing, listing)
        self._gone = {rank: gone for rank, gone in self._gone.items() if rank in missing}
        found = self._ended(life, missing, sync, listing)
        left = [rank for rank in missing if rank not in found]
        for rank, seconds in self._beats.silent(left).items():
            found[rank] = 0, f"rank {rank} has shown no sign of life for {seconds:.0f} s"
        for rank in [rank for rank in self._gone if rank not in found]:
            _log.info("rank %d: rank %d is back", life.rank, rank)
            del self._gone[rank]
        return any([self._consider(life, rank, *about, sync) for rank, about in found.items()])  # noqa: C419 - all of them

    def _ended(
        self, life: Life, missing: Collection[int], sync: int, listing: Iterable[str]
    ) -> dict[int, tuple[int, str]]:
        """The missing ranks that have said that they have failed, each with its epoch and a sentence about it."""
        hints = {
            hint.rank: hint
            for hint in sorted(
                (
                    hint
                    for hint in map(Hint.parse, listing)
                    if hint is not None and hint.event == "leave"
                ),
                key=lambda hint: hint.epoch,
            )
        }
        found: dict[int, tuple[int, str]] = {}
        for rank, hint in hints.items():
            if rank not in missing:
                continue
            if any(
                epoch > hint.epoch for epoch in epochs(life.store.list(f"claims/{rank:05}/"), rank)
            ):
                continue
            if hint.key not in self._endings:
                self._endings[hint.key] = read_farewell(hint.key, life.store.peek)
            kind, why = self._endings[hint.key]
            if kind == "left":
                raise UnequalSyncsError(
                    f"rank {rank} has left the run after {_syncs(sync - 1)}, so this replica (rank {life.rank}) cannot take sync "
                    f"{sync}, which needs all replicas. All replicas must take the same number of syncs.",
                    rank,
                )
            found[rank] = (
                hint.epoch,
                f"rank {rank} {kind} after {_syncs(sync - 1)}" + (f": {why}" if why else ""),
            )
        return found

    def _consider(self, life: Life, rank: int, epoch: int, why: str, sync: int) -> bool:
        now, allowed = life.now, life.settings.return_within
        gone = self._gone.get(rank)
        if gone is None:
            epoch = epoch or max(epochs(life.store.list(f"claims/{rank:05}/"), rank), default=0)
            gone = self._gone[rank] = _Gone(epoch, why, now)
            self._said.pop(rank, None)
        left = gone.since + allowed - now
        if left > 0:
            if now - self._said.get(rank, -NOTICE_SECONDS) >= NOTICE_SECONDS:
                self._said[rank] = now
                _log.warning(
                    "rank %d: %s. Waiting up to %.0f s for it to be started again (return_within).",
                    life.rank,
                    why,
                    left,
                )
            return False
        return give_up(life, rank, gone.epoch, why, sync)


def changeable(settings: Mapping[str, str]) -> dict[str, str]:
    """Those of a replica's settings that may change when a run is resumed, if all ranks change them in the same way."""
    return {
        name: settings[name]
        for name in sorted(MAY_CHANGE - {"committed", "init"})
        if name in settings
    }


def _syncs(count: int) -> str:
    return "1 sync" if count == 1 else f"{count} syncs"
