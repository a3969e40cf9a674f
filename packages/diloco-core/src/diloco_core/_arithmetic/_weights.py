"""How much each contribution to a sync counts.

A pure function of what the keys of the contributions say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .._terms._weighting import Weighting


@dataclass(frozen=True, slots=True)
class Amount:
    """How much training a contribution covers.

    Attributes:
        steps: The number of inner steps.
        tokens: The number of tokens; 0 unless they are counted.
    """

    steps: int = 0
    tokens: int = 0


def weight(weighting: Weighting, amount: Amount) -> float:
    """The weight of a contribution among others; 0 if it covers no inner step."""
    match weighting:
        case Weighting.EQUAL:
            return 1.0
        case Weighting.STEPS:
            return float(amount.steps)
        case Weighting.TOKENS:
            # Python divides integers exactly, and rounds once.
            return amount.tokens**2 / amount.steps if amount.steps else 0.0


def shares(weighting: Weighting, amounts: Iterable[Amount]) -> tuple[float, ...]:
    """Return the factors of the contributions to their sum, in the order of ``amounts``.

    They add up to 1.

    Empty if all weights are equal: the contributions are then added up as they are, and their sum
    is divided by their number.
    """
    weights = [weight(weighting, amount) for amount in amounts]
    if len(set(weights)) < 2:
        return ()
    total = math.fsum(weights)
    return tuple(each / total for each in weights)
