"""Error feedback: the loss of a codec in a fragment's contributions, added to the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .._arithmetic._layout import CHUNK_BYTES, Layout, Piece, Rule
from .._codecs._codec import Codec
from .._errors import NonFiniteDeltaError
from .._squares import not_finite


@dataclass(eq=False)
class Residual:
    """The residual e of one fragment.

    A replica that has learned D contributes ``c = D + decay * e``, sent as ``E(c)``.

    Only if that contribution is counted, e becomes ``c - decode(E(c))``: otherwise no replica has
    added up what was decoded, and e is still right. So with a decay of 1, the sum of everything
    that was decoded and counted, plus e, is the sum of everything that was learned (Seide et al.,
    2014; Karimireddy et al., arXiv 1901.09847). SparseLoCo has a decay of 0.95 (arXiv 2508.15706).

    Not thread-safe. While a sync is under way, only the thread that carries it out uses this, if it
    does at all (:meth:`offer`).

    Args:
        layout: How the fragment's values are divided. Groups without outer steps have no residual.
        codec: How contributions are encoded.
        decay: How much of the residual is added to the next contribution, above 0 and at most 1.
        rank: The rank of this replica, for errors.
        locate: The name of the tensor that holds an element of a piece, for errors.

    Attributes:
        values: The residual, one flat tensor per group (empty for buffers); no tensor if it is 0.
        tag: The position of this rank in the fragment (the number of its inner steps that are
            counted in it) at which the residual is right. Every position belongs to one counted
            contribution, so it is wrong at any other position.
    """

    layout: Layout
    codec: Codec
    decay: float
    rank: int
    locate: Callable[[Piece, int], str]

    def __post_init__(self) -> None:
        self.tag = 0
        self.values: list[torch.Tensor] = []
        # What the residual becomes if the contribution counts.
        self._offered: list[torch.Tensor] = []
        self._offered_tag = 0
        self._open = False

    def offer(self, learned: Sequence[torch.Tensor], stop: int) -> None:
        """Add the residual to what was learned, in place, and keep what will be lost if it counts.

        Args:
            learned: D, one flat tensor per group.
            stop: The position of this rank if the contribution counts.

        Raises:
            NonFiniteDeltaError: The contribution, or what it decodes to, holds NaN or infinity. The
                residual stays.
        """
        if self.values:
            for index, values in self._outer(learned):
                values.add_(self.values[index], alpha=self.decay)
        if self._open:
            return  # an earlier contribution to the same sync was sent, and this one is not
        self._offered = []
        lost = [torch.empty(0, device="cpu") for _ in learned]
        for index, values in self._outer(learned):
            lost[index] = torch.empty_like(values)
        for shard in range(self.layout.shards):
            for chunk in self.layout.chunks(shard, CHUNK_BYTES):
                if self.layout.groups[chunk.group].rule is Rule.OUTER:
                    values = learned[chunk.group][chunk.start : chunk.stop]
                    self._lose(chunk, values, lost[chunk.group][chunk.start : chunk.stop])
        self._offered, self._offered_tag = lost, stop

    def _lose(self, chunk: Piece, values: torch.Tensor, out: torch.Tensor) -> None:
        self.codec.decode(self.codec.encode(values), out)
        torch.sub(values, out, out=out)
        lost = not_finite(out)
        if lost is not None:
            # One such value makes its whole block so. Name the tensor that holds it, unless
            # decoding has made it.
            given = not_finite(values)
            raise NonFiniteDeltaError(
                self.locate(chunk, lost if given is None else given), self.rank
            )

    def settle(self, fate: str, position: int | None) -> bool:
        """Note what became of the contribution, or of a sync of another fragment (``"none"``).

        Args:
            fate: What became of the contribution; see :attr:`.SyncReport.contribution`.
            position: How many inner steps of this rank are counted in the fragment now; None if all
                are that were sent.

        Returns:
            Whether the residual no longer holds and was set to zero: the run has counted another
            contribution of this rank, or has returned to an older state.
        """
        if fate == "open":
            self._open = True
            return False
        offered, self._offered, self._open = self._offered, [], False
        if fate == "counted" and offered and position in {None, self._offered_tag}:
            self.values, self.tag = offered, self._offered_tag
            return False
        return position is not None and self.move(position)

    def move(self, position: int) -> bool:
        """Keep the residual if it is right at this position; otherwise set it to zero.

        Returns whether it was set to zero.
        """
        if position == self.tag:
            return False
        self.values, self.tag = [], position
        return True

    def load(self, values: Sequence[torch.Tensor], tag: int) -> None:
        """Continue with a saved residual, which is copied."""
        self.values = [saved.clone() for saved in values]
        self._offered, self._open, self.tag = [], False, tag

    def _outer(self, values: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
        groups = self.layout.groups
        return [(i, each) for i, each in enumerate(values) if groups[i].rule is Rule.OUTER]
