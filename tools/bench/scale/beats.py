"""Signs of life in virtual time: a thread that waits in real time has no place there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_core._strict._liveness import Liveness

from .driver import VirtualDriver

if TYPE_CHECKING:
    from collections.abc import Callable


class VirtualLiveness(Liveness):
    """:class:`Liveness` whose beat needs no thread."""

    _end: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin to beat."""
        count = 0

        def beat() -> None:
            nonlocal count
            count += 1
            self._beat(count)

        driver = getattr(self._store.store, "driver", None)
        assert isinstance(driver, VirtualDriver)
        self._beat(0)
        self._end = driver.network.repeat(self._timing.beat_interval, beat)

    def stop(self) -> None:
        """Stop the beat; repeatable."""
        if self._end is not None:
            self._end()
