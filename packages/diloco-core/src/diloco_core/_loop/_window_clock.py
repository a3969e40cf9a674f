"""Where a replica stands in its window, by its clock, if ``sync_every`` is a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _notices as notices

if TYPE_CHECKING:
    from .._terms._schedule import Due
    from .._terms._windows import Windows
    from ._membership import Membership


class WindowClock:
    """Asks the clock for :class:`._windows.Windows`, which decide. Not thread-safe.

    Args:
        windows: They say when a fragment is sent and adopted.
        membership: Says when the window began, and whether the others wait for this replica's contribution.
    """

    def __init__(self, windows: Windows, membership: Membership) -> None:
        self._windows = windows
        self._membership = membership
        self._clock = membership.support.clock
        self._began = self._looked = 0.0
        self._is_expected = True
        self._slow_windows = 0

    def begin(self) -> None:
        """Begin the next window: a sync was adopted, or the run's state was loaded."""
        position = self._membership.position
        self._began, self._is_expected = position.seen, position.expected
        self._looked = self._clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the window began."""
        return self._clock() - self._began

    def due(self, since_adoption: int, since_sent: int | None, *, half_taken: bool) -> Due:
        """What has to be done after an inner step.

        Args:
            since_adoption: Inner steps since the last adoption of any fragment.
            since_sent: Inner steps since the fragment whose turn it is was sent; None if it has not been sent.
            half_taken: Whether some of several inner optimizers have already taken their next step.
        """
        due = self._windows.due(self.elapsed, since_sent=since_sent, half_taken=half_taken)
        if due.send and not half_taken and self._windows.late(self.elapsed, since_adoption):
            self._slow_windows += 1
            # Not the first time: the first step of a program may take long, because something is compiled.
            if self._slow_windows == 2:
                took = (self.elapsed, self._windows.length)
                rank = self._membership.exchange.rank
                notices.log.warning(notices.SLOW_FOR_ITS_WINDOW, rank, *took)
        return due

    def may_look(self) -> bool:
        """Whether it is time to look, in the middle of a window, for syncs without this replica. Counts as having looked."""
        if self._is_expected:
            return False
        now = self._clock()
        if not self._windows.may_look(now - self._looked):
            return False
        self._looked = now
        return True
