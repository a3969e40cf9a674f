"""A sync under way: in the background while its replica trains, or at once while the replica waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

from .._outer._delayed import DelayedFragment

if TYPE_CHECKING:
    from collections.abc import Callable

    from .._errors import UnequalSyncsError
    from .._exchange._pending import Pending
    from .._exchange._report import SyncReport
    from .._outer._fragment import Fragment

_STOP_SECONDS = 5.0


class Flight:
    """One sync from its beginning to its result. Used by the thread that trains.

    Args:
        run: Carries out the sync.
        clock: A clock in seconds.

    Attributes:
        seconds: How long the sync took; 0 as long as it goes on.
    """

    def __init__(self, run: Callable[[], SyncReport], clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._run = run
        self._clock = clock
        self._report: SyncReport | None = None
        self._error: BaseException | None = None
        self._ended: Callable[[float | None], bool] | None = None

    @classmethod
    def of(
        cls,
        fragment: Fragment,
        begin: Callable[[], Pending],
        clock: Callable[[], float],
        *,
        begun: bool,
    ) -> Self:
        """The sync of a fragment.

        Args:
            fragment: The fragment.
            begin: Begins the sync in the exchange.
            clock: A clock in seconds.
            begun: Whether to begin it at once, so that only the rest is carried out later.
        """
        if not begun:
            return cls(partial(_whole_sync, fragment, begin), clock)
        _collect(fragment)
        return cls(partial(_second_half, fragment, begin()), clock)

    def start(
        self, in_background: Callable[[Callable[[], object]], Callable[[float | None], bool]]
    ) -> None:
        """Carry the sync out in the background; see :func:`.._timing.in_thread`."""
        self._ended = in_background(self._act)

    def result(self) -> SyncReport:
        """Wait for the result; carry the sync out now if :meth:`start` was not called. Repeatable.

        Raises:
            SyncError: The sync has failed.
        """
        if self._ended is not None:
            self._ended(None)
            self._raise()
        elif self._report is None:
            self._report = self._timed()
        assert self._report is not None
        return self._report

    def check(self) -> None:
        """Raise the error of a sync that has failed by now. Does not wait."""
        self._raise()

    def stop(self, give_up: Callable[[], None]) -> None:
        """End a sync whose result is not wanted any more.

        Returns when it has ended, but after five seconds at most: it may be in a request that takes long.

        Args:
            give_up: Makes the waits of the sync end with an error.
        """
        if not self.over:
            give_up()
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
            self._report = self._timed()
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that trains
            self._error = error

    def _timed(self) -> SyncReport:
        start = self._clock()
        try:
            return self._run()
        finally:
            self.seconds = self._clock() - start

    def _raise(self) -> None:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # it would keep many frames in memory


@dataclass(slots=True)
class Sent:
    """A sync that was sent and is not adopted yet.

    Attributes:
        number: The fragment.
        inner_steps: How many inner steps the contribution covers.
        sent_at: How many inner steps this replica had taken then.
        counted: How many inner steps of this rank the run had counted before.
        flight: The sync.
        behind: Whether the replica trains meanwhile.
        parted: Says that another replica has left after fewer syncs, if that is known already.
    """

    number: int
    inner_steps: int
    sent_at: int
    counted: int
    flight: Flight
    behind: bool
    parted: UnequalSyncsError | None = None


def undecided(report: SyncReport) -> bool:
    """Whether the sync has ended without a decision, so that the replica holds what it held before."""
    return not (report.committed or report.reloaded or report.contribution == "dropped")


def _whole_sync(fragment: Fragment, begin: Callable[[], Pending]) -> SyncReport:
    _collect(fragment)
    return _second_half(fragment, begin())


def _second_half(fragment: Fragment, pending: Pending) -> SyncReport:
    report = pending.finish()
    if isinstance(fragment, DelayedFragment) and not (report.reloaded or undecided(report)):
        fragment.pack(report.contribution)
    return report


def _collect(fragment: Fragment) -> None:
    if isinstance(fragment, DelayedFragment):
        fragment.collect()
