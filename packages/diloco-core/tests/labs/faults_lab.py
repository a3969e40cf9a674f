"""Faults at random for simulated runs of three replicas, and what they must bring to light."""

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


def assert_caught(wrong, *, first, runs):
    """Of so many simulated runs, one goes wrong, and not because the mutant is clumsy.

    Args:
        wrong: What goes wrong in the run with a number.
        first: The number of the first one that shows it, as a rule: looked at first, since others
            take long.
        runs: How many there are.
    """
    found = next(filter(None, map(wrong, [*range(first, runs), *range(first)])), None)
    assert found, f"{runs} simulated runs found nothing wrong"
    assert not any(name in text for text in found for name in _CLUMSY), f"not the rule: {found}"
