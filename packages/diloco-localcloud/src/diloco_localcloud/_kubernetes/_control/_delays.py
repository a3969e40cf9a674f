"""The delays of a control plane and its kubelets."""

from __future__ import annotations

import random
import time
from typing import NamedTuple

# The seed of stand-ins that are given none; pytest's --strict-timing sets it.
default_seed = 0


class Delay(NamedTuple):
    """A delay in seconds: the usual one, and the bounds of the drawn ones."""

    usual: float
    least: float
    most: float


class Delays:
    """The usual delays (seed 0), or delays that are drawn each time."""

    def __init__(self, seed: int | None) -> None:
        seed = default_seed if seed is None else seed
        self._random = random.Random(seed) if seed else None

    def of(self, delay: Delay) -> float:
        """Return the delay for this time."""
        if self._random is None:
            return delay.usual
        return self._random.uniform(delay.least, delay.most)

    def answer_late(self) -> None:
        """Let some answers arrive after newer ones, by waiting in real time."""
        if self._random is not None and self._random.random() < 0.1:
            time.sleep(self._random.uniform(0.0, 0.05))
