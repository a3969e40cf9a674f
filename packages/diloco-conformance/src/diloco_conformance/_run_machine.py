"""Try sequences of the state machine, and shorten one that breaks a promise, within bounds."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis.errors import HypothesisException
from hypothesis.stateful import run_state_machine_as_test

from ._harness import Harness
from ._lab import Lab
from ._machine import ExecutorMachine, machine

#: How many sequences are tried at most to make one shorter that breaks a promise.
TRIES = 100


class Enough(BaseException):
    """The signal that ends the search: not a test's error, so hypothesis passes it on at once."""


class Bounds:
    """The end of the search, when enough sequences were tried since the first that broke a promise.

    Attributes:
        shortest: The error that was raised after the fewest steps so far.
    """

    def __init__(self) -> None:
        self.shortest: Exception | None = None
        self._steps = 0
        self._left = TRIES

    def end(self, error: BaseException | None, lab: Lab) -> None:
        """Take note that a sequence has ended, with an error or well.

        Raises:
            Enough: It was the last one.
        """
        if isinstance(error, Exception) and not isinstance(error, HypothesisException):
            if self.shortest is None or len(lab.history) < self._steps:
                self.shortest, self._steps = error, len(lab.history)
            if lab.hung:
                raise Enough  # each further one would cost real time, too
        if self.shortest is not None:
            self._left -= 1
            if self._left == 0:
                raise Enough


def bounded(rules: type[ExecutorMachine], bounds: Bounds) -> type[ExecutorMachine]:
    """Return these rules, within bounds."""

    class Bounded(rules):  # type: ignore[misc, valid-type]
        def teardown(self) -> None:
            try:
                super().teardown()
            finally:
                bounds.end(sys.exception(), self.lab)

    return Bounded


def run_machine(
    make_harness: Callable[[], Harness],
    *,
    examples: int,
    steps: int,
    shrink: bool,
    rules: type[ExecutorMachine] = ExecutorMachine,
    seed: int | None = None,
) -> None:
    """Try sequences until one breaks a promise: the same ones every time, or those of a seed."""
    bounds = Bounds()
    factory = machine(make_harness, bounded(rules, bounds))
    if seed is not None:
        factory = seeded(seed)(factory)
    error: Exception | None = None
    try:
        run_state_machine_as_test(
            factory,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
                deadline=None,
                database=None,
                derandomize=seed is None,
                print_blob=False,
                report_multiple_bugs=False,  # the search would go on after the first
                suppress_health_check=list(HealthCheck),
            ),
        )
    except Enough:
        error = bounds.shortest
    except Exception as found:  # noqa: BLE001 - raised again below
        error = found
    if error is not None:
        if seed is not None:
            error.add_note(f"--diloco-seed {seed} tries these sequences again")
        raise error
