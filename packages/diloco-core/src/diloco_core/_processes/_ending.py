"""SIGTERM to one process of a replica, or to all: they end together, after the same step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .._loop._inner_loop import EXIT_CODE, TrainingProcess
from ._board import Board


@contextmanager
def interruptible(process: TrainingProcess) -> Iterator[None]:
    """While this lasts, SIGTERM ends the process at once, and not after an inner step."""
    process.training = False
    yield
    process.training = True


@contextmanager
def put_off(process: TrainingProcess) -> Iterator[None]:
    """While this lasts, SIGTERM waits: the other processes take part in what is done here."""
    # Whoever has been told before carries this out: it is how the replica ends.
    before, waits = process.training, not process.told_to_end
    process.training = True
    yield
    process.training = before
    if process.told_to_end and waits and not before:
        raise SystemExit(EXIT_CODE)


INTERVAL = 0.2
"""Seconds between two looks at the board."""

_JOINS = 2.0  # as long as the leader's process is there, the board answers sooner
_PATIENCE = 20.0  # torchrun waits for 30 seconds before it kills


class Ending:
    """Watches, in a thread, whether this process or another has been told to end.

    If so, the processes tell each other how many steps they have taken, and all go on to the same
    one. Nothing is exchanged for this at a step, until then. A leader that waits for the store does
    not notice that another process has failed: it is interrupted.

    Args:
        process: Handles the signal in this process.
        board: What the processes let each other know.
        taken: Returns how many steps this process has taken.
        leads: Whether this process may be waiting for the store: there it is interrupted.

    Attributes:
        asked: Whether all are to end.
    """

    def __init__(
        self, process: TrainingProcess, board: Board, taken: Callable[[], int], *, leads: bool
    ) -> None:
        self._process, self._board, self._taken, self._leads = process, board, taken, leads
        self.asked = False
        self._last = 0
        self._known = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="diloco-ending", daemon=True)

    def start(self) -> None:
        """Handle the signal from now on, if nobody else does."""
        self._process.watch()
        self._thread.start()

    def stop(self) -> None:
        """Leave the signal to others again."""
        self._over.set()
        self._process.stop()
        # A thread that talks to the board while the interpreter ends would abort the process.
        self._thread.join(_JOINS)

    def last_step(self) -> int:
        """Return the step after which all end; asked for once they are to.

        Raises:
            SystemExit: The others do not answer.
        """
        if not self._known.wait(_PATIENCE):
            raise SystemExit(EXIT_CODE)
        return self._last

    def _watch(self) -> None:
        try:
            while not self._over.wait(INTERVAL):
                self._board.note(self._taken())
                if self._process.told_to_end:
                    self._board.end()
                elif not self._board.ends():
                    if self._leads and (failure := self._board.failure()):
                        self._process.interrupt(failure)
                    continue
                # Before the steps are read: a step that ends later sees it, and waits.
                self.asked = True
                if self._leads and self._process.handles and not self._process.told_to_end:
                    os.kill(os.getpid(), signal.SIGTERM)
                taken = self._taken()
                # Not in one call: the store would answer no other one meanwhile.
                while (last := self._board.last_step(taken)) is None:
                    if self._over.wait(INTERVAL / 10):
                        return
                self._last = last
                self._known.set()
                return
        except (RuntimeError, ValueError):
            # The leader's process is gone, and the board with it: whatever the processes do
            # together next fails, and says so. Or a stranger has written there.
            self._known.set()
