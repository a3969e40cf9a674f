"""What one life of a fixed run does about ranks that it waits for: reports what became of them, and gives them up in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..._errors import MismatchError
from ..._exchange._base import Schema
from ..._exchange._schemas import MAY_CHANGE, compare_schemas
from ..._retry import NOTICE_SECONDS
from .._claims import claimed_settings
from .._records._farewell import Farewell, concluded, read_farewell
from .._records._keys import Delta, Hint, epochs, farewells, schema
from ._ends import give_up

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from .._life._life import Life
    from ._beats import Beats


class _Gone(NamedTuple):
    """What a life knows about a rank that is gone.

    Attributes:
        epoch: The life of that rank; 0 if it is not known.
        lost: The rank that was lost first, if that is why this one has failed; otherwise the same.
        why: What became of it, as a sentence.
        since: When this was first known.
    """

    epoch: int
    lost: int
    why: str
    since: float = 0.0


class Others:
    """What one life knows of the other ranks while it waits for them. Not thread-safe.

    Args:
        beats: Their signs of life.
        settings: What this life was started with, of the settings that may change when the run is resumed.
        earlier: In a life that continues the run: the highest epochs of all ranks before its own claim, which others follow.
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
        if not life.takes_means:
            return
        (progress,) = life.fragments
        own = schema(life.run, progress.job)
        for delta in filter(None, map(Delta.parse, listing)):
            # Its base is that of this run, so it is no process of an earlier one that wakes up late.
            if delta.rank in missing and delta.base == progress.digest and delta.schema != own:
                raise MismatchError(
                    f"in mean {delta.sync}, rank {delta.rank} contributes other tensors than rank {life.rank}: all replicas must "
                    "sync the same tensors, with the same shapes and dtypes, in the same order"
                )

    def is_past(self, hint: Hint) -> bool:
        """Whether a life has ended before this one began to continue the run: others come in its place."""
        return 0 < hint.epoch <= self._earlier.get(hint.rank, 0)

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
            found[rank] = _Gone(
                0, rank, f"rank {rank} has shown no sign of life for {seconds:.0f} s"
            )
        for rank in [rank for rank in self._gone if rank not in found]:
            life.say.info("rank %d is back", rank)
            del self._gone[rank]
        # Those first that nobody else has made fail.
        ordered = sorted(found.items(), key=lambda item: (item[1].lost != item[0], item[0]))
        return any([self._consider(life, rank, gone, sync) for rank, gone in ordered])  # noqa: C419 - all of them

    def _ended(
        self, life: Life, missing: Collection[int], sync: int, listing: Iterable[str]
    ) -> dict[int, _Gone]:
        """The missing ranks that have said that they have failed."""
        newest_last = sorted(farewells(listing), key=lambda hint: hint.epoch)
        hints = {hint.rank: hint for hint in newest_last}
        found: dict[int, _Gone] = {}
        for rank, hint in hints.items():
            if rank not in missing or (life.settings.resume and self.is_past(hint)):
                continue
            if any(
                epoch > hint.epoch for epoch in epochs(life.store.list(f"claims/{rank:05}/"), rank)
            ):
                continue
            if hint.key not in self._endings:
                self._endings[hint.key] = read_farewell(hint.key, life.store.peek)
            lost, why = concluded(life.rank, rank, self._endings[hint.key], sync - 1)
            found[rank] = _Gone(hint.epoch, lost, why)
        return found

    def _consider(self, life: Life, rank: int, found: _Gone, sync: int) -> bool:
        now, allowed, why = life.now, life.settings.return_within, found.why
        gone = self._gone.get(rank)
        if gone is None:
            claimed = epochs(life.store.list(f"claims/{rank:05}/"), rank)
            epoch = found.epoch or max(claimed, default=0)
            gone = self._gone[rank] = _Gone(epoch, found.lost, why, now)
            self._said.pop(rank, None)
        left = gone.since + allowed - now
        if left > 0:
            if now - self._said.get(rank, -NOTICE_SECONDS) >= NOTICE_SECONDS:
                self._said[rank] = now
                life.say.warning(
                    "%s. Waiting up to %.0f s for it to be started again (return_within).",
                    why,
                    left,
                )
            return False
        return give_up(life, rank, gone.epoch, why, sync, found.lost)


def changeable(settings: Mapping[str, str]) -> dict[str, str]:
    """Those of a replica's settings that may change when a run is resumed, if all ranks change them in the same way."""
    return {
        name: settings[name]
        for name in sorted(MAY_CHANGE - {"committed", "init"})
        if name in settings
    }
