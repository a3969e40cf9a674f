"""The process that trains: a process that is forked from it is not a replica, and SIGTERM tells it to end."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .._errors import SyncError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

# What a shell says of a process that SIGTERM has ended. Code 0 would count as done work, and nothing would replace the replica.
EXIT_CODE = 128 + signal.SIGTERM


class TrainingProcess:
    """Remembers which process has made or entered an outer loop, and handles SIGTERM in it.

    The platform takes the machine away, or somebody cancels the run: the signal is put off to the end of an inner step, so that
    what was learned can be saved. Only in the main thread, and only where nobody else handles the signal. Between the steps (in
    a sync, or while the replicas meet or leave) nothing is to be saved, and others may be waited for: there the signal ends the
    block at once, and so does a second one anywhere.

    Attributes:
        told_to_end: Whether the signal has come.
        training: Whether an inner step may be under way.
    """

    def __init__(self) -> None:
        self.told_to_end = self.training = False
        self._number = os.getpid()

    def remember(self) -> None:
        """Remember that this process trains."""
        self._number = os.getpid()

    def is_fork(self) -> bool:
        """Whether this process was forked from the one that trains."""
        return os.getpid() != self._number

    def check(self) -> None:
        """Refuse another process than the one that trains.

        Raises:
            SyncError: This process was forked from it.
        """
        if self.is_fork():
            raise SyncError(
                f"this process ({os.getpid()}) was forked from the process that trains ({self._number}), and is not a replica: "
                "it must neither step the inner optimizer nor use the outer loop. Start processes that train with the start "
                "method 'spawn', and give each its own rank."
            )

    def watch(self) -> None:
        """Handle the signal from now on, if it is ours to handle."""
        self._replace_handler(signal.SIG_DFL, self._heard)

    def stop(self) -> None:
        """Leave the signal to others again."""
        self._replace_handler(self._heard, signal.SIG_DFL)

    @staticmethod
    def _replace_handler(present: object, new: Any) -> None:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) == present:
            signal.signal(signal.SIGTERM, new)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """While this lasts, no inner step is under way."""
        self.training = False
        yield
        self.training = True

    def _heard(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - what a handler is given
        if self.is_fork():
            # A child that was forked, such as a worker of a data loader, has this handler too, and must end as it always did.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        again, self.told_to_end = self.told_to_end, True
        if again or not self.training:
            raise SystemExit(EXIT_CODE)
