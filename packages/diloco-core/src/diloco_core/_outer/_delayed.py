"""A fragment whose sync goes on while its replica trains: it sends what the model held, and takes the result later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._arithmetic._layout import Piece, Rule
from ._fragment import Fragment

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class DelayedFragment(Fragment):
    """A :class:`Fragment` that is sent at one inner step and adopted at a later one. Not thread-safe.

    While it is detached (from :meth:`detach` to :meth:`arrive` or :meth:`attach`), the exchange uses only the global copy, the
    outer state and, of the fragment that is sent, a snapshot of the contribution (:meth:`depart`). The training loop touches
    none of them. So the exchange may run in another thread, and the model is free.
    """

    _detached = False
    _sent: list[torch.Tensor] | None = None
    _unchanged: Collection[int] = ()
    _before: list[torch.Tensor] | None = None

    def detach(self) -> None:
        """Keep the exchange away from the model from now on."""
        self._detached = True

    def attach(self) -> None:
        """Let the exchange use the model again, and forget what was sent."""
        self._detached = False
        self._sent = self._before = None

    def depart(self) -> None:
        """Take the snapshot that is sent, and detach. The model may change from now on."""
        self.attach()
        self.begin()
        self._unchanged = super().unchanged()
        sent = []
        for index, group in enumerate(self.layout.groups):
            values = torch.empty(group.numel, dtype=group.dtype, device="cpu")
            contribution = super().contribution(Piece(index, 0, group.numel), values)
            if contribution is not values:  # a view of the model
                values.copy_(contribution)
            sent.append(values)
        if self.residual is not None and self.steps is not None:
            self.residual.offer(sent, self.steps[1])
        for segment in self._all_segments():
            segment.values = None
        self._sent = sent
        self.detach()

    def arrive(self, fate: str) -> None:
        """Give the model the result, mixed with its own values, and delete the gradients, which belong to the old values.

        A contribution that was counted is in the new global copy G; of the own values L, ``alpha`` is kept: the model becomes
        ``lerp(G, L, alpha)``. One that was carried is not in it: with the old global copy G', the model becomes
        ``lerp(G, G', alpha) + (L - G')``, so that its own progress stays whole. What was dropped keeps nothing. Only parameters
        are mixed: buffers take what was synced.

        Args:
            fate: What became of the contribution; see :attr:`.SyncReport.contribution`.
        """
        before = self._before if fate == "carried" else None
        alpha = self.alpha if fate in {"counted", "carried"} else 0.0
        self.attach()
        self.begin()
        with torch.no_grad():
            for index, group in enumerate(self.layout.groups):
                whole = Piece(index, 0, group.numel)
                if group.rule is not Rule.OUTER or not (alpha or before):
                    self.adopt(whole, self.destination(whole))
                elif alpha < 1:
                    self._mix(whole, alpha, before[index] if before else None)
        self._adopted = True
        self.finish()

    def _mix(self, whole: Piece, alpha: float, before: torch.Tensor | None) -> None:
        for local, start, stop in self._overlaps(whole):
            new = self.copy[whole.group][start:stop].to(local.device, local.dtype)
            if before is None:
                local.copy_(torch.lerp(new, local, alpha))
                continue
            # As with contributions, the rounding of a global copy to the model's dtype is not progress of the replica.
            old = before[start:stop].to(local.device, local.dtype)
            wide = before.dtype
            progress = local.to(wide).sub_(old.to(wide)).to(local.dtype)
            local.copy_(torch.lerp(new, old, alpha).add_(progress))

    def begin(self) -> None:
        """Make flat views of the model's tensors, unless the fragment is detached."""
        if not self._detached:
            super().begin()

    def finish(self) -> None:
        """Write copied tensors back, unless the fragment is detached."""
        if not self._detached:
            super().finish()

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
        """Set the model to ``values``, unless the fragment is detached: :meth:`arrive` does it then."""
        if not self._detached:
            super().adopt(piece, values)

    def progress(self) -> list[torch.Tensor]:
        """What the replica has learned since the last sync.

        A detached fragment returns nothing, and keeps its global copy for :meth:`arrive`.
        """
        if not self._detached:
            return super().progress()
        self._before = [values.clone() for values in self.copy]
        return []

    def reapply(self, progress: Sequence[torch.Tensor]) -> None:
        """Add progress to the model again, unless the fragment is detached: :meth:`arrive` does it then."""
        if not self._detached:
            super().reapply(progress)
