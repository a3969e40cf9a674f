"""Faults at random for simulated runs of three replicas."""

from diloco_core.testing import Fault

HARMFUL = ("kill before", "kill after", "delay", "zombie", "jump", "lose answer")


def harmful(chance, count):
    """So many faults, at the operations of the first two lives of three ranks."""
    return [
        Fault(
            chance.randrange(3), chance.randint(1, 2), chance.randint(10, 110), chance.choice(HARMFUL), 60.0,
        )
        for _ in range(count)
    ]  # fmt: skip
