"""When an inner step counts, if several optimizers make one step together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


class StepCounter:
    """Groups the steps of several optimizers into inner steps, in which each of them steps at most once.

    An inner step is complete when all optimizers have stepped, in any order. It also ends when one of them is about to
    step again, since then a gradient scaler has skipped the others. This shows in one of two ways: the optimizer begins
    its next step, or it has new gradients already when the last of the others steps. With one optimizer, each of its
    steps is an inner step.

    Where every optimizer has a backward pass of its own that also reaches the parameters of the others (some GANs), such new
    gradients say nothing: they are thrown away. Once that was seen, new gradients are not asked for any more.

    Args:
        optimizers: The number of optimizers.
    """

    def __init__(self, optimizers: int) -> None:
        self._all_optimizers = frozenset(range(optimizers))
        self._stepped: set[int] = set()
        self._counted_early = False
        self._about_to_step: set[int] = set()
        self._apart = False  # each has a backward pass of its own

    @property
    def stepped(self) -> list[int]:
        """Numbers of the optimizers that have stepped in the inner step that is under way and still to count."""
        return [] if self._counted_early else sorted(self._stepped)

    def load(self, stepped: Collection[int]) -> None:
        """Continue in the middle of an inner step, in which these optimizers have stepped."""
        self._stepped = set(stepped) & self._all_optimizers

    def before(
        self,
        optimizer: int,
        done: Callable[[int], bool] = lambda _: False,
        replaced: Callable[[int], bool] = lambda _: False,
    ) -> bool:
        """Note that an optimizer is about to step. Returns whether that ends an inner step, in which others were skipped.

        Args:
            optimizer: The number of the optimizer.
            done: Returns whether another optimizer has already stepped with its present gradients. If so, that step belongs to
                the inner step that begins now.
            replaced: Returns whether the optimizer has other gradients than those with which it was about to step.
        """
        expected, self._about_to_step = self._about_to_step, set()
        if optimizer in expected and replaced(optimizer):
            # Its last step was a part of the same inner step as that of the other one, which has been counted.
            self._stepped.clear()
            self._counted_early = False
            self._apart = True
        if optimizer not in self._stepped:
            return False
        self._stepped = {other for other in self._stepped if other != optimizer and done(other)}
        return self._not_counted_yet()

    def after(self, optimizer: int, waiting: Callable[[int], bool] = lambda _: False) -> bool:
        """Note that an optimizer has stepped. Returns whether that ends an inner step.

        Args:
            optimizer: The number of the optimizer.
            waiting: Returns whether another optimizer has new gradients, with which it is about to step. If so, its last step
                was a part of an earlier inner step, and it has not stepped in the present one yet.
        """
        self._stepped.add(optimizer)
        if self._stepped != self._all_optimizers:
            return False
        others = set() if self._apart else self._all_optimizers - {optimizer}
        self._about_to_step = {other for other in others if waiting(other)}
        self._stepped -= self._about_to_step
        if self._stepped == self._all_optimizers:
            self._stepped.clear()
        return self._not_counted_yet()

    def count_early(self) -> bool:
        """Count the inner step under way now, and not when it ends. Returns whether there is one that was not counted."""
        is_new = bool(self.stepped)
        self._counted_early |= is_new
        return is_new

    def end(self) -> bool:
        """Note that no more steps will come. Returns whether that ends an inner step that was not counted."""
        was_under_way = bool(self._stepped)
        self._stepped.clear()
        return was_under_way and self._not_counted_yet()

    def _not_counted_yet(self) -> bool:
        """Whether the inner step that ends now was not counted early."""
        early, self._counted_early = self._counted_early, False
        return not early
