"""Faults at random for simulated runs of three replicas, and what they must bring to light."""

import pytest
from simulated import Fault

_CLUMSY = ("AttributeError", "NameError", "TypeError", "ValueError", "ZeroDivisionError")
HARMFUL = ("kill before", "kill after", "delay", "zombie", "jump", "lose answer")


def harmful(chance, count):
    """So many faults, at the operations of the first two incarnations of three ranks."""
    return [
        Fault(
            chance.randrange(3), chance.randint(1, 2), chance.randint(10, 110),
            chance.choice(HARMFUL), 60.0,
        )
        for _ in range(count)
    ]  # fmt: skip


def assert_caught(wrong, mutate, *, first, runs=60):
    """Of so many simulated runs, one goes wrong by the mutant, which is not just clumsy.

    Args:
        wrong: What goes wrong in the run with a number.
        mutate: Takes away a rule with a ``MonkeyPatch``.
        first: The number of the first one that shows it, as a rule: looked at first, since others
            take long.
        runs: How many there are.
    """
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        numbers = [*range(first, runs), *range(first)]
        caught = next(((n, found) for n in numbers if (found := wrong(n))), None)
    assert caught, f"{runs} simulated runs found nothing wrong"
    number, found = caught
    assert not any(name in text for text in found for name in _CLUMSY), f"not the rule: {found}"
    assert wrong(number) == [], "the same run goes wrong with the rule"
