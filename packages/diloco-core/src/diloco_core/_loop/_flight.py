"""A sync that goes on in the background while its replica trains.

This also says when a sync is due if ``sync_every`` is a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .._errors import UnequalSyncsError
from .._exchange._pending import Pending
from .._exchange._report import SyncReport
from .._outer._delayed import DelayedFragment
from .._outer._fragment import Fragment
from .._terms._schedule import Due, Windows
from . import _notices as notices
from ._membership import Membership

_STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Sent:
    """What a replica knew when it contributed to a sync.

    Attributes:
        number: The number of the fragment.
        inner_steps: How many inner steps the contribution covers.
        at: How many inner steps this replica had taken.
        counted: How many inner steps of this rank the run had counted.
    """

    number: int
    inner_steps: int
    at: int
    counted: int


@dataclass(eq=False)
class Flight:
    """One sync that goes on while its replica trains. Used by the thread that trains.

    Attributes:
        fragment: The fragment that is synced.
        membership: Begins the sync.
        sent: What was sent.
        stood: For how many seconds the replica did not train while it sent the fragment.
        seconds: How long the sync took; 0 as long as it goes on.
        parted: Says that another replica has left after fewer syncs, if that is known already.
        report: The result; None as long as it is not there.
    """

    fragment: Fragment
    membership: Membership
    sent: Sent
    stood: float = 0.0
    seconds: float = 0.0
    parted: UnequalSyncsError | None = None
    report: SyncReport | None = None
    _last: bool = False
    _pending: Pending | None = None
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
        """Wait for the result; carry the sync out now if it was to begin :meth:`again`. Repeatable.

        Raises:
            SyncError: The sync has failed.
        """
        if self._ended is not None:
            self._ended(None)
            self.check()
        elif self.report is None:
            self.report = self._carry_out()
        assert self.report is not None
        return self.report

    def again(self) -> None:
        """Forget the result, and begin the sync again as one after which this replica leaves."""
        self._last = True
        self._pending = self.report = self._ended = None

    def check(self) -> None:
        """Raise the error of a sync that has failed by now. Does not wait."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # it would keep many frames in memory

    def stop(self) -> None:
        """End a sync whose result is not wanted any more.

        Returns when it has ended, but after five seconds at most: it may be in a long request.
        """
        if not self.over:
            self.membership.exchange.give_up()
            if self._ended is not None:
                self._ended(_STOP_SECONDS)

    @property
    def over(self) -> bool:
        """Say whether nothing goes on in the background any more."""
        return self._ended is None or self._ended(0)

    def _act(self) -> None:
        try:
            self.report = self._carry_out()
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
        last = self._last or not self.membership.elastic
        self._pending = self.membership.exchange.begin(self.fragment, last=last)
        return self._pending


def undecided(report: SyncReport) -> bool:
    """Say whether the sync ended undecided, so that the replica holds what it held before."""
    return not (report.committed or report.reloaded or report.contribution == "dropped")


def copied(error: UnequalSyncsError) -> UnequalSyncsError:
    """The same error without the frames that it was raised in, which it would keep in memory."""
    return UnequalSyncsError(str(error), error.rank)


class WindowClock:
    """Asks the clock for :class:`._schedule.Windows`, which decide. Not thread-safe.

    Args:
        windows: They say when a fragment is sent and adopted.
        membership: Says when the window began, and whether the others wait for this replica.
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
        """Return what has to be done after an inner step.

        Args:
            since_adoption: Inner steps since the last adoption of any fragment.
            since_sent: Inner steps since the fragment whose turn it is was sent; None if it has not
                been sent.
            half_taken: Whether some of several inner optimizers have already taken their next step.
        """
        due = self._windows.due(self.elapsed, since_sent=since_sent, half_taken=half_taken)
        if due.send and not half_taken and self._windows.late(self.elapsed, since_adoption):
            self._slow_windows += 1
            # Not the first time: a program's first step may take long, as something is compiled.
            if self._slow_windows == 2:
                took = (self.elapsed, self._windows.length)
                rank = self._membership.exchange.rank
                notices.log.warning(notices.SLOW_FOR_ITS_WINDOW, rank, *took)
        return due

    def may_look(self) -> bool:
        """Say whether to look now, in the middle of a window, for syncs without this replica.

        Counts as having looked.
        """
        if self._is_expected:
            return False
        now = self._clock()
        if not self._windows.may_look(now - self._looked):
            return False
        self._looked = now
        return True
