"""The process that trains: a process that is forked from it is not a replica."""

from __future__ import annotations

import os

from .._errors import SyncError


class TrainingProcess:
    """Remembers which process has made or entered an outer loop."""

    def __init__(self) -> None:
        self.remember()

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
