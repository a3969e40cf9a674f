"""A sync under way: in the background while its replica trains, or at once while the replica waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .._outer._delayed import DelayedFragment

if TYPE_CHECKING:
    from collections.abc import Callable

    from .._errors import UnequalSyncsError
    from .._exchange._base import Exchange
    from .._exchange._pending import Pending
    from .._exchange._report import SyncReport
    from .._outer._fragment import Fragment
    from ._membership import Membership

_STOP_SECONDS = 5.0


@dataclass(eq=False)
class Flight:
    """One sync from its beginning to its adoption. Used by the thread that trains.

    Attributes:
        fragment: The fragment that is synced.
        membership: Begins the sync.
        number: The number of the fragment.
        inner_steps: How many inner steps the contribution covers.
        sent_at: How many inner steps this replica had taken then.
        counted: How many inner steps of this rank the run had counted before.
        last: Whether this replica leaves afterwards.
        behind: Whether the replica trains meanwhile.
        seconds: How long the sync took; 0 as long as it goes on.
        parted: Says that another replica has left after fewer syncs, if that is known already.
    """

    fragment: Fragment
    membership: Membership
    number: int
    inner_steps: int
    sent_at: int
    counted: int
    last: bool
    behind: bool
    seconds: float = 0.0
    parted: UnequalSyncsError | None = None
    _pending: Pending | None = None
    _report: SyncReport | None = None
    _error: BaseException | None = None
    _ended: Callable[[float | None], bool] | None = None

    def start(self) -> None:
        """Carry the sync out in the background; see :func:`.._timing.in_thread`.

        Where another thread may not begin it, it is begun before this returns.
        """
        if not self.membership.support.begins_behind:
            self._begin()
        self._ended = self.membership.support.in_background(self._act)

    def result(self) -> SyncReport:
        """Wait for the result; carry the sync out now if :meth:`start` was not called. Repeatable.

        Raises:
            SyncError: The sync has failed.
        """
        if self._ended is not None:
            self._ended(None)
            self.check()
        elif self._report is None:
            self._report = self._carry_out()
        assert self._report is not None
        return self._report

    def again(self) -> None:
        """Forget the result, and begin the sync once more as one after which this replica leaves."""
        self.last = True
        self._pending = self._report = self._ended = None

    def check(self) -> None:
        """Raise the error of a sync that has failed by now. Does not wait."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # it would keep many frames in memory

    def stop(self, exchange: Exchange) -> None:
        """End a sync whose result is not wanted any more.

        Returns when it has ended, but after five seconds at most: it may be in a request that takes long.
        """
        if not self.over:
            exchange.give_up()
            if self._ended is not None:
                self._ended(_STOP_SECONDS)

    @property
    def succeeded(self) -> bool:
        """Whether the result is there."""
        return self._report is not None

    @property
    def over(self) -> bool:
        """Whether nothing goes on in the background any more."""
        return self._ended is None or self._ended(0)

    def _act(self) -> None:
        try:
            self._report = self._carry_out()
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that trains
            self._error = error

    def _carry_out(self) -> SyncReport:
        clock = self.membership.support.clock
        start = clock()
        try:
            report = (self._pending or self._begin()).finish()
            adopted = not (report.reloaded or undecided(report))
            if adopted and isinstance(self.fragment, DelayedFragment):
                self.fragment.pack(report.contribution)
            return report
        finally:
            self.seconds = clock() - start

    def _begin(self) -> Pending:
        if isinstance(self.fragment, DelayedFragment):
            self.fragment.collect()
        self._pending = self.membership.begin_sync(self.fragment, last=self.last)
        return self._pending


def undecided(report: SyncReport) -> bool:
    """Whether the sync has ended without a decision, so that the replica holds what it held before."""
    return not (report.committed or report.reloaded or report.contribution == "dropped")
