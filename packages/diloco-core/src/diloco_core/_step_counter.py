"""When an inner step counts, where several optimizers make one step together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


class StepCounter:
    """Groups the steps of several optimizers into inner steps, in which each of them steps at most once.

    An inner step is complete when all optimizers have stepped, in any order. It also ends when one of them is about to
    step again: a gradient scaler has skipped the others then. With one optimizer, each of its steps is an inner step.

    Args:
        optimizers: How many there are.
    """

    def __init__(self, optimizers: int) -> None:
        self._everybody = frozenset(range(optimizers))
        self._stepped: set[int] = set()

    @property
    def stepped(self) -> list[int]:
        """Which optimizers have stepped in the inner step under way; empty between two inner steps."""
        return sorted(self._stepped)

    def load(self, stepped: Collection[int]) -> None:
        """Go on in the middle of an inner step, in which these have stepped."""
        self._stepped = set(stepped) & self._everybody

    def before(self, optimizer: int) -> bool:
        """An optimizer is about to step; returns whether that ends an inner step that others have skipped."""
        return optimizer in self._stepped and self.end()

    def after(self, optimizer: int) -> bool:
        """An optimizer has stepped; returns whether that completes an inner step."""
        self._stepped.add(optimizer)
        return self._stepped == self._everybody and self.end()

    def end(self) -> bool:
        """No more steps will come: returns whether that ends an inner step."""
        was_under_way = bool(self._stepped)
        self._stepped.clear()
        return was_under_way
