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
from collections.abc import Mapping
from dataclasses import dataclass, field
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


class Encoded(NamedTuple):
    """Hold the bytes of one chunk: its update, and the outer optimizer's tensors by name."""

    update: torch.Tensor
    outer: Mapping[str, torch.Tensor]


@dataclass(eq=False)
class CodedUpdates:
    """Hold how a fragment's state is published, and the chunks that were encoded last.

    Not thread-safe.

    The encoded chunks of this replica's shards in the last sync are kept, since encoding what was
    decoded need not give the same bytes, and damaged objects are written again.

    Args:
        codec: Encodes updates, residuals and the outer optimizer's tensors.
        full_every: Every so many syncs of the fragment its values are published whole.
        fragments: How many fragments are synced in turn.

    Attributes:
        chunks: The encoded chunks of this replica's shards.
    """

    codec: Codec
    full_every: int
    fragments: int
    chunks: dict[Piece, Encoded] = field(default_factory=dict, init=False)
