"""A sync in two halves: contributing, then waiting for the others and adopting the result.

An exchange writes a sync as one generator that yields once, between the halves. :class:`Syncs` runs
the first half when the sync is begun, and the second half when it is finished.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from .._errors import SyncError
from ._report import SyncReport

Steps = Generator[None, None, "SyncReport"]
Guard = Callable[[], AbstractContextManager[object]]


class GivenUpError(SyncError):
    """The replica does not want the result of the sync any more.

    It is raised where the sync would have waited.
    """


class Pending(Protocol):
    """A sync that has been begun. To be used once, by the thread that has begun it.

    The job's contribution must not change until :meth:`finish` has returned. If a replica trains on
    in the meantime, it gives the exchange a snapshot. Before :meth:`finish` is called, the exchange
    does not write to the job.
    """

    def finish(self) -> SyncReport:
        """Wait for the others, reduce, update and adopt.

        :meth:`._base.Exchange.sync` says what it raises.
        """


class Syncs:
    """The syncs of one exchange.

    Only one is under way at a time, since each starts from the result of the one before.
    """

    def __init__(self) -> None:
        self._under_way: _Halves | None = None
        self._interrupted = False

    def begin(self, name: str, steps: Steps, guard: Guard) -> Pending:
        """Run the first half of a sync.

        Args:
            name: The name of what is synced.
            steps: The generator of the sync; it has not been started.
            guard: Makes a context that is entered around everything that is run, and that handles
                its errors.

        Raises:
            SyncError: Another sync is under way.
        """
        self.check(f"the sync of {name} cannot be begun")
        halves = self._under_way = _Halves(name, steps, guard, self.give_up)
        with halves.at_work():
            next(steps)
        return halves

    def check(self, refusal: str) -> None:
        """Refuse to do something while a sync is under way; ``refusal`` says what cannot be done.

        Raises:
            SyncError: A sync is under way.
        """
        if self._under_way is not None:
            raise SyncError(
                f"{refusal}: the sync of {self._under_way.name} has been begun and not finished. "
                "First call finish() of the object that begin() returned, or give the sync up with "
                "abort()."
            )

    def interrupt(self) -> None:
        """Make :meth:`interrupted` true for a thread that carries out a sync, now or later.

        Any thread may call this.
        """
        self._interrupted = True

    def interrupted(self) -> bool:
        """Say whether the calling thread carries out a sync whose result is not wanted any more."""
        halves = self._under_way
        return self._interrupted and halves is not None and halves.thread == threading.get_ident()

    def check_interrupted(self) -> None:
        """End the sync that the calling thread carries out, if its result is not wanted any more.

        Raises:
            GivenUpError: It is not wanted.
        """
        if self.interrupted():
            raise GivenUpError("the sync was given up by the replica itself")

    def sleeping(self, sleep: Callable[[float], None]) -> Callable[[float], None]:
        """A function that sleeps, but ends a sync whose result is not wanted any more."""

        def sleep_or_end(seconds: float) -> None:
            self.check_interrupted()
            sleep(seconds)

        return sleep_or_end

    def give_up(self) -> None:
        """End the sync that is under way, if there is one: it cannot be finished any more."""
        if self._under_way is not None:
            self._under_way.over = True
            self._under_way = None


class _Halves:
    """The :class:`Pending` of a sync that is written as a generator."""

    def __init__(self, name: str, steps: Steps, guard: Guard, ended: Callable[[], None]) -> None:
        self.name = name
        self.over = False
        self.thread = 0  # the one that is at work on it, if there is one
        self._steps = steps
        self._guard = guard
        self._ended = ended

    def finish(self) -> SyncReport:
        if self.over:
            raise SyncError(f"the sync of {self.name} is over: begin another one")
        with self.at_work():
            try:
                next(self._steps)
            except StopIteration as end:
                report: SyncReport = end.value
        self._ended()
        return report

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self.thread = threading.get_ident()
        try:
            with self._guard():
                yield
        except BaseException:
            self._ended()
            raise
        finally:
            self.thread = 0
