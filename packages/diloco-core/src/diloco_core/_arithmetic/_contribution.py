"""What one replica brings to one sync, besides the values themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ._rate import Proposal
from ._weights import Amount

_NOTHING = Proposal()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What one replica brings to one sync. It does not change while the sync is under way.

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
