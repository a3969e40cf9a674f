"""A fragment whose sync goes on while its replica trains: it sends what the model held, and takes the result later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._arithmetic._layout import Piece, Rule
from ._fragment import Fragment

if TYPE_CHECKING:
    from collections.abc import Collection


class DelayedFragment(Fragment):
    """A :class:`Fragment` that is sent at one inner step and adopted at a later one. Not thread-safe.

    Between :meth:`depart` and :meth:`arrive` the exchange uses only a snapshot of the contribution, the global copy and the
    outer state, none of which the training loop touches. So the exchange may run in another thread, and the model is free.
    """

    _sent: list[torch.Tensor] | None = None
    _unchanged: Collection[int] = ()

    def depart(self) -> None:
        """Take the snapshot that is sent. The model may change from now on."""
        self.begin()
        self._unchanged = super().unchanged()
        sent = []
        for index, group in enumerate(self.layout.groups):
            values = torch.empty(group.numel, dtype=group.dtype, device="cpu")
            contribution = super().contribution(Piece(index, 0, group.numel), values)
            if contribution is not values:  # a view of the model
                values.copy_(contribution)
            sent.append(values)
        for segment in self._all_segments():
            segment.values = None
        self._sent = sent

    def arrive(self, *, keep: bool) -> None:
        """Set the model to the global copy, or mix the two, and delete the gradients, which belong to the old values.

        Only parameters are mixed: buffers take what was synced.

        Args:
            keep: Whether ``alpha`` of the replica's own values is kept. A contribution that was dropped keeps nothing.
        """
        self._sent = None
        self._unchanged = ()
        alpha = self.alpha if keep else 0.0
        self.begin()
        with torch.no_grad():
            for index, group in enumerate(self.layout.groups):
                whole = Piece(index, 0, group.numel)
                if group.rule is not Rule.OUTER or not alpha:
                    self.adopt(whole, self.destination(whole))
                    continue
                for local, start, stop in self._overlaps(whole):
                    adopted = self.copy[index][start:stop].to(local.device, local.dtype)
                    local.copy_(torch.lerp(adopted, local, alpha))
        self._adopted = True
        self.finish()

    def give_up(self) -> None:
        """Forget the snapshot: the sync will not be adopted."""
        self._sent = None

    def contribution(self, piece: Piece, out: torch.Tensor) -> torch.Tensor:
        """The snapshot; without one, what the model holds now."""
        if self._sent is None:
            return super().contribution(piece, out)
        return self._sent[piece.group][piece.start : piece.stop]

    def is_surely_finite(self, piece: Piece) -> bool:
        """Unknown for a snapshot: only the model's values would tell it more quickly than the snapshot's own."""
        return self._sent is None and super().is_surely_finite(piece)

    def unchanged(self) -> Collection[int]:
        """The groups of buffers that were as in the global copy when the snapshot was taken."""
        return super().unchanged() if self._sent is None else self._unchanged

    def adopt(self, piece: Piece, values: torch.Tensor) -> None:
        """Set the model to ``values``, but not while a snapshot is under way: :meth:`arrive` does it then."""
        if self._sent is None:
            super().adopt(piece, values)
