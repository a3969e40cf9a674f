"""Describe what one replica brings to one sync besides the values, and how much it counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .._terms._terms import Weighting
from ._rate import Proposal

_NOTHING = Proposal()


@dataclass(frozen=True, slots=True)
class Amount:
    """Count the training that a contribution covers.

    Attributes:
        steps: The number of inner steps.
        tokens: The number of tokens; 0 unless they are counted.
    """

    steps: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """Hold what one replica brings to one sync. It does not change while the sync is under way.

    Attributes:
        steps: The inner steps of this replica that it covers: first, and first one after; None:
            there is no contribution.
        tokens: The tokens of these steps; 0 unless they are counted.
        proposal: The learning rate that this replica proposes for the outer step.
        norms: The norms of its tensors, if contributions are clipped. The exchange measures them
            before it sends the values (:func:`._clip.measure_norms`).
    """

    steps: tuple[int, int] | None = None
    tokens: int = 0
    proposal: Proposal = _NOTHING
    norms: Sequence[float] = ()

    @property
    def amount(self) -> Amount:
        """Return how much training it covers."""
        start, stop = self.steps or (0, 0)
        return Amount(stop - start, self.tokens)


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
