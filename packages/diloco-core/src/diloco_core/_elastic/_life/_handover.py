"""What one sync of a life leaves to the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from .._log._keys import Delta


class Handover:
    """What one sync of a life leaves to the next one.

    Written by the sync that takes over or leaves something (:meth:`take_open`, :meth:`leave_open`, :meth:`note_former`), by the
    adoption of its result (:meth:`nobody_is_absent`, :meth:`are_absent`), and by the exchange, which knows how it ended
    (:meth:`has_differed`, :meth:`is_completed`). Everybody else reads.
    """

    def __init__(self) -> None:
        self._open: Delta | None = None
        self._absent: set[int] = set()
        self._former: set[str] = set()
        self._differed = False

    @property
    def open(self) -> Delta | None:
        """The own contribution to a sync that this life did not wait for to its end."""
        return self._open

    @property
    def absent(self) -> Collection[int]:
        """Ranks whose shards others had to update: they are not waited for."""
        return self._absent

    @property
    def former(self) -> Collection[str]:
        """Hints of lives that left before the run was resumed: they are waited for."""
        return self._former

    @property
    def differed(self) -> bool:
        """Whether it has started again because its state was not that of the others, and not completed a sync since."""
        return self._differed

    def take_open(self, sync: int) -> Delta | None:
        """The contribution that was left open, if it is to this sync; it is left open no more."""
        left, self._open = self._open, None
        return left if left is not None and left.sync == sync else None

    def leave_open(self, own: Delta | None) -> None:
        """This life goes without the sync that it has contributed to."""
        self._open = own

    def note_former(self, hints: Collection[str]) -> None:
        """These hints were left before the run was resumed."""
        self._former = set(hints)

    def nobody_is_absent(self) -> None:
        """The result of a sync is about to be adopted: who does not do its part will be seen."""
        self._absent = set()

    def are_absent(self, ranks: Collection[int]) -> None:
        """These ranks have not published their shards in time."""
        self._absent |= set(ranks)

    def has_differed(self) -> None:
        """This life starts again because its state was not that of the others, or not what it was."""
        self._differed = True

    def is_completed(self) -> None:
        """A sync is completed."""
        self._differed = False
