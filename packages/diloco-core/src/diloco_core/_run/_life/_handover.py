"""What one sync of a life leaves to the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from .._records._keys import Delta


class Handover:
    """What one sync of a life leaves to the next one.

    It is written by the sync that takes over or leaves something (:meth:`take_open`, :meth:`leave_open`, :meth:`note_former`), by
    the adoption of its result (:meth:`nobody_is_absent`, :meth:`are_absent`), and by the exchange, which knows how the sync
    ended (:meth:`has_differed`, :meth:`is_completed`). All other code only reads.
    """

    def __init__(self) -> None:
        self._open: Delta | None = None
        self._absent: set[int] = set()
        self._former: set[str] = set()
        self._differed = False

    @property
    def open(self) -> Delta | None:
        """This life's contribution to a sync whose end it did not wait for; None if there is none."""
        return self._open

    @property
    def absent(self) -> Collection[int]:
        """Ranks whose shards others had to update, so that the next sync does not wait for them."""
        return self._absent

    @property
    def former(self) -> Collection[str]:
        """Hints of lives that left before the run was resumed. They are ignored, so that these ranks are waited for."""
        return self._former

    @property
    def differed(self) -> bool:
        """Whether this life has started again because its state was wrong (:meth:`has_differed`), and completed no sync since."""
        return self._differed

    def take_open(self, sync: int) -> Delta | None:
        """Take the contribution that was left open: returns it if it is for this sync, and forgets it in any case."""
        contribution, self._open = self._open, None
        return contribution if contribution is not None and contribution.sync == sync else None

    def leave_open(self, contribution: Delta | None) -> None:
        """Note that this life continues without waiting for the end of a sync, to which it may have contributed."""
        self._open = contribution

    def note_former(self, hints: Collection[str]) -> None:
        """Note that these hints were left before the run was resumed."""
        self._former = set(hints)

    def nobody_is_absent(self) -> None:
        """Forget absent ranks, because the result of another sync is about to be adopted, which shows them anew."""
        self._absent = set()

    def are_absent(self, ranks: Collection[int]) -> None:
        """Note that these ranks have not published their shards in time."""
        self._absent |= set(ranks)

    def has_differed(self) -> None:
        """Note that this life starts again because its state differs from the others', or has changed in memory."""
        self._differed = True

    def is_completed(self) -> None:
        """Note that a sync is completed."""
        self._differed = False
