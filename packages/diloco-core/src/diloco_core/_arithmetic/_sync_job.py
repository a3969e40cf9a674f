"""The interface through which an exchange sees what is synced: one replica's side of one sync."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch

from .._terms._terms import Terms
from ._coded import CodedUpdates
from ._contribution import Contribution
from ._layout import Layout, Piece
from ._rate import Rate


class SyncJob(Protocol):
    """One replica's side of one sync.

    Tensors are flat, contiguous, on the CPU and in their group's dtype.

    Attributes:
        name: The name of what is synced.
        kind: ``initial`` (rank 0's values), ``outer`` (an outer step) or ``mean``.
        layout: How the values are divided.
        terms: What the replicas agree on. How contributions are encoded and whether they are
            clipped is in the fingerprint, too.
        fingerprint: A digest of everything that replicas must agree on; equal for equal schemas.
        rate: The learning rate with which :meth:`update` takes the outer step. An exchange that
            agrees on it (``Support.agrees_on_lr``) sets it before the first update, and before the
            sync ends.
        contribution: What this replica brings to the sync under way.
    """

    name: str
    kind: str
    layout: Layout
    terms: Terms
    fingerprint: str
    rate: Rate
    contribution: Contribution

    @property
    def coded(self) -> CodedUpdates | None:
        """The encoding of published state; None if values and outer state are published plain."""

    def starts(self, group: int) -> Sequence[int]:
        """Return where the tensors of a group start in it, in order."""

    def contributed(self, piece: Piece, out: torch.Tensor) -> torch.Tensor:
        """The values of this replica's contribution to a piece.

        They are written into ``out``, or are a view whose values do not change until the piece is
        updated.
        """

    def unchanged(self) -> Collection[int]:
        """Return the groups whose contribution equals the global copy, so that it need not be sent.

        All replicas hold that copy.
        """

    def locate(self, piece: Piece, index: int) -> str:
        """The name of the tensor that holds element ``index`` of the piece."""

    def must_be_finite(self, piece: Piece) -> bool:
        """Say whether NaN and infinity are refused in contributions to the piece and their mean."""

    def update(self, piece: Piece, reduced: torch.Tensor) -> torch.Tensor:
        """Apply the reduced contributions to this replica's copy, and return the new values.

        These are a view, or ``reduced`` itself.
        """

    def check_update(self, piece: Piece, values: torch.Tensor, sync: int) -> None:
        """Refuse new values that the model cannot hold.

        Raises:
            NonFiniteUpdateError: A value is NaN or infinite in the dtype of a tensor of the model.
        """

    def destination(self, piece: Piece) -> torch.Tensor | None:
        """Return the tensor into which published values of this piece are to be read.

        None means that they may be read into any buffer.
        """

    def adopt(self, piece: Piece, values: torch.Tensor) -> None:
        """Adopt published values (``values`` is ``destination(piece)``, unless that is None)."""

    def published(self, piece: Piece) -> torch.Tensor:
        """Return the values of a piece, whose shard this replica owns, after its update."""

    def outer_scalars(self, piece: Piece) -> Mapping[str, float]:
        """Return the outer optimizer's scalars, such as a step count.

        They are equal for all elements of the piece's group in this replica's shards.
        """

    def keeps_outer(self, piece: Piece, name: str) -> bool:
        """Say whether :meth:`outer_state` of a piece can have a tensor with this name.

        Outer groups need not keep the same ones.
        """

    def outer_state(self, piece: Piece) -> Mapping[str, torch.Tensor]:
        """Return the outer optimizer's tensors for a piece of a shard that this replica owns.

        Each is as large as the piece.
        """
