"""When an inner step counts, where several optimizers make one step together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


class StepCounter:
    """Groups the steps of several optimizers into inner steps, in which each of them steps at most once.

    An inner step is complete when all optimizers have stepped, in any order. It also ends when one of them is about to
    step again: a gradient scaler has skipped the others then. Either it begins its next step, or the last of the others
    steps while it has new gradients already. With one optimizer, each of its steps is an inner step.

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

    def before(self, optimizer: int, done: Callable[[int], bool] = lambda _: False) -> bool:
        """An optimizer is about to step; returns whether that ends an inner step that others have skipped.

        Args:
            optimizer: Its number.
            done: Whether another one has stepped by the gradients that it has now: that belongs to the inner step that begins.
        """
        if optimizer not in self._stepped:
            return False
        self._stepped = {other for other in self._stepped if other != optimizer and done(other)}
        return True

    def after(self, optimizer: int, waiting: Callable[[int], bool] = lambda _: False) -> bool:
        """An optimizer has stepped; returns whether that completes an inner step.

        Args:
            optimizer: Its number.
            waiting: Whether another one has new gradients, which it is about to step by. What it has stepped by before was
                an inner step of its own, and another one is under way now.
        """
        self._stepped.add(optimizer)
        if self._stepped != self._everybody:
            return False
        self._stepped -= {
            other for other in self._everybody if other != optimizer and waiting(other)
        }
        return self._stepped != self._everybody or self.end()

    def end(self) -> bool:
        """No more steps will come: returns whether that ends an inner step."""
        was_under_way = bool(self._stepped)
        self._stepped.clear()
        return was_under_way
