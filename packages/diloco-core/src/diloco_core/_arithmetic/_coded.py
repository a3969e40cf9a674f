"""Published state that is encoded: owners of shards publish changes of the values, not the values.

With G the global copy before a sync, the outer step makes a new one; U is the new one minus G, plus
the residual r. The codec E turns U into bytes, and all replicas, the owner too, take G +
decode(E(U)) as the new global copy. What is lost of U is the new residual, as it is after coding
too: decode(E(U - decode(E(U)))). So are the outer optimizer's tensors. Everything that the next
sync depends on is thus in the store, and nothing is private to the owner. Every few syncs of a
fragment, the values are published whole as well; a run that is resumed starts there, and adds the
updates since.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from .._codecs._codec import Codec
from ._layout import Piece

RESIDUAL = "update_residual"
"""The residual's name among the outer optimizer's tensors, where these are published or saved."""


class Update(NamedTuple):
    """An update as it is published.

    Attributes:
        data: E(U).
        left: E(U - decode(E(U))).
        residual: What ``left`` decodes to: the residual of the next update.
    """

    data: torch.Tensor
    left: torch.Tensor
    residual: torch.Tensor


def encode_update(
    codec: Codec, old: torch.Tensor, new: torch.Tensor, residual: torch.Tensor | None
) -> Update | None:
    """Encode an update, and make ``new`` what all replicas will hold.

    Args:
        codec: The codec.
        old: The values before the outer step; flat.
        new: The values after it. They become ``old`` plus what the update decodes to; NaN or
            infinite if the update is.
        residual: What the update before lost; None if there was none.

    Returns:
        The update; None if it is not finite, and so cannot be encoded.
    """
    update = new - old
    if residual is not None:
        update += residual
    if not math.isfinite(update.sum().item()) and not bool(update.isfinite().all()):
        new.copy_(update)
        return None
    data = codec.encode(update)
    decoded = torch.empty_like(update)
    codec.decode(data, decoded)
    torch.add(old, decoded, out=new)
    left = codec.encode(update - decoded)
    residual = torch.empty_like(update)
    codec.decode(left, residual)
    return Update(data, left, residual)


class CodedUpdates:
    """The way in which a fragment's state is published, and the chunks that were encoded last.

    Not thread-safe.

    The encoded chunks of this replica's shards in the last sync are kept, since encoding what was
    decoded need not give the same bytes, and damaged objects are written again.

    Args:
        codec: Encodes updates, residuals and the outer optimizer's tensors.
        full_every: Every so many syncs of the fragment its values are published whole.
        fragments: How many fragments are synced in turn.
    """

    def __init__(self, codec: Codec, full_every: int, fragments: int) -> None:
        self.codec = codec
        self.full_every = full_every
        self.fragments = fragments
        self._encoded: dict[Piece, tuple[torch.Tensor, Mapping[str, torch.Tensor]]] = {}

    def keep(self, piece: Piece, update: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep the encoded update of a chunk, and its encoded outer state by name."""
        self._encoded[piece] = update, tensors

    def holds(self, piece: Piece) -> bool:
        """Say whether the encoded bytes of a chunk are kept, so that they can be written again."""
        return piece in self._encoded

    def forget(self, pieces: Iterable[Piece]) -> None:
        """Drop the encoded bytes of some chunks, because another replica has updated them."""
        for piece in pieces:
            self._encoded.pop(piece, None)

    def update(self, piece: Piece) -> torch.Tensor:
        """The encoded update of a chunk of one of this replica's shards."""
        return self._encoded[piece][0]

    def outer(self, piece: Piece, name: str) -> torch.Tensor:
        """One of the outer optimizer's tensors for such a chunk, encoded."""
        return self._encoded[piece][1][name]
