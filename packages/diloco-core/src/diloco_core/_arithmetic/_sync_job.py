"""What is synced, as an exchange sees it: one replica's side of one sync."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import torch

    from .._codecs._codec import Codec
    from ._layout import Layout, Piece


class SyncJob(Protocol):
    """One replica's side of one sync. Tensors are flat, contiguous, on the CPU and in their group's dtype."""

    @property
    def name(self) -> str:
        """Name of what is synced."""
        ...

    @property
    def kind(self) -> str:
        """``initial`` (rank 0's values), ``outer`` (an outer step) or ``mean``."""
        ...

    @property
    def layout(self) -> Layout:
        """How the values are cut."""
        ...

    @property
    def codec(self) -> Codec:
        """How contributions are sent; part of the fingerprint."""
        ...

    @property
    def fingerprint(self) -> str:
        """Digest of everything that replicas must agree on; equal for equal schemas."""
        ...

    @property
    def supersedes(self) -> Sequence[int]:
        """Earlier syncs whose published state is of no use once this one is complete."""
        ...

    def contribution(self, piece: Piece, out: torch.Tensor) -> torch.Tensor:
        """This replica's contribution: written into ``out``, or a view that is left alone until the piece is updated."""
        ...

    def unchanged(self) -> Collection[int]:
        """Groups whose contribution is the global copy that all replicas hold, so that nobody has to send it."""
        ...

    def locate(self, piece: Piece, index: int) -> str:
        """Name of the tensor that holds element ``index`` of the piece."""
        ...

    def must_be_finite(self, piece: Piece) -> bool:
        """Whether contributions to the piece, and their mean, may hold neither NaN nor infinity."""
        ...

    def update(self, piece: Piece, reduced: torch.Tensor) -> torch.Tensor:
        """Apply the reduced contributions to the own copy and return the new values (a view, or ``reduced`` itself)."""
        ...

    def check_update(self, piece: Piece, values: torch.Tensor, sync: int) -> None:
        """Refuse new values that the model cannot hold.

        Raises:
            NonFiniteUpdateError: They are NaN or infinite in the dtype of a tensor of the model.
        """
        ...

    def destination(self, piece: Piece) -> torch.Tensor | None:
        """Where published values of this piece are to be read to, or None where a buffer will do."""
        ...

    def adopt(self, piece: Piece, values: torch.Tensor) -> None:
        """Take over published values (``values`` is ``destination(piece)`` where there is one)."""
        ...

    def published(self, piece: Piece) -> torch.Tensor:
        """The values of a piece of an own shard after its update."""
        ...

    def outer_scalars(self, piece: Piece) -> Mapping[str, float]:
        """The outer optimizer's scalars (a step count, say), equal for all elements of the own shards."""
        ...

    def outer_state(self, piece: Piece) -> Mapping[str, torch.Tensor]:
        """The outer optimizer's tensors that belong to a piece of an own shard, each of the piece's size."""
        ...
