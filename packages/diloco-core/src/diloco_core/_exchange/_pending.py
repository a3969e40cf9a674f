"""A sync in two halves: what a replica contributes, and what it waits for.

An exchange writes a sync as one function that yields once, between the halves; :class:`Syncs` runs it up to there where the
sync is begun, and the rest where it is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeVar

from .._errors import SyncError

if TYPE_CHECKING:
    from ._report import SyncReport

T = TypeVar("T")

Ready = Callable[[], bool]
"""What the function of a sync yields: tells whether the second half would not wait for a contribution."""

Steps = Generator[Ready, None, "SyncReport"]
Guard = Callable[[], AbstractContextManager[object]]


class Pending(Protocol):
    """A sync that has been begun. Used once, by the thread that has begun it.

    Until :meth:`finish` is through, the job's contribution must stay what it was: whoever trains on in between gives the
    exchange a snapshot. Nothing of the job is written before :meth:`finish`.
    """

    def ready(self) -> bool:
        """Whether :meth:`finish` would not wait for another replica's contribution, as far as can be told without waiting.

        It costs a request or two, and may be asked again and again. An exchange that cannot tell says True.

        Raises:
            SyncError: What :meth:`finish` would raise, where that shows already.
        """
        ...

    def finish(self) -> SyncReport:
        """Wait for the others, reduce, update, adopt; see :meth:`._base.Exchange.sync` for what it raises."""
        ...


class Syncs:
    """The syncs of one exchange. One is under way at a time, since the next one starts from what it ends with."""

    def __init__(self) -> None:
        self._under_way: _Halves | None = None

    def begin(self, what: str, steps: Steps, guard: Guard) -> Pending:
        """Run the first half of a sync.

        Args:
            what: The name of what is synced.
            steps: The sync; it has not been begun.
            guard: Is entered around everything that is run: it does what is to be done where that raises.

        Raises:
            SyncError: Another sync is under way.
        """
        self.check(f"the sync of {what} cannot be begun")
        halves = self._under_way = _Halves(what, steps, guard, self.give_up)
        halves.begin()
        return halves

    def check(self, refused: str) -> None:
        """Refuse what must not be done while a sync is under way.

        Raises:
            SyncError: One is.
        """
        if self._under_way is not None:
            raise SyncError(
                f"{refused}: the sync of {self._under_way.what} has been begun and not finished. First call finish() of the "
                "object that begin() returned, or give the sync up with abort()."
            )

    def give_up(self) -> None:
        """The sync under way is over, if there is one: it cannot be finished any more."""
        if self._under_way is not None:
            self._under_way.over = True
            self._under_way = None


class _Halves:
    def __init__(self, what: str, steps: Steps, guard: Guard, ended: Callable[[], None]) -> None:
        self.what = what
        self.over = False
        self._steps = steps
        self._guard = guard
        self._ended = ended
        self._ready: Ready = bool

    def begin(self) -> None:
        self._ready = self._run(lambda: next(self._steps))

    def ready(self) -> bool:
        self._check()
        return self._run(self._ready)

    def finish(self) -> SyncReport:
        self._check()
        report = self._run(self._rest)
        self._ended()
        return report

    def _rest(self) -> SyncReport:
        try:
            next(self._steps)
        except StopIteration as end:
            report: SyncReport = end.value
            return report
        raise RuntimeError(f"the sync of {self.what} yields twice, and has two halves only")

    def _run(self, act: Callable[[], T]) -> T:
        try:
            with self._guard():
                return act()
        except BaseException:
            self._ended()
            raise

    def _check(self) -> None:
        if self.over:
            raise SyncError(f"the sync of {self.what} is over: begin another one")
