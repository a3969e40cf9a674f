"""How contributions are sent, and in how many bytes.

Only values that take an outer step are encoded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .._codecs._codec import Codec
from .._codecs._plain import PLAIN
from ._layout import Layout, Piece, Rule
from ._sync_job import SyncJob


def codec_of(codec: Codec, layout: Layout, group: int) -> Codec:
    """The codec with which a group is sent."""
    return codec if layout.groups[group].rule is Rule.OUTER else PLAIN


def sent_bytes(codec: Codec, layout: Layout, piece: Piece) -> int:
    """The size of a piece on the wire in bytes. No other module computes it."""
    return codec_of(codec, layout, piece.group).size(layout.groups[piece.group].dtype, piece.numel)


def as_sent(job: SyncJob) -> Callable[[Piece, torch.Tensor], torch.Tensor]:
    """Return a source of this replica's contribution as all other replicas read it.

    The contribution is encoded and decoded, unless that changes nothing.
    """
    if job.terms.codec.plain:
        return job.contributed

    def read(piece: Piece, out: torch.Tensor) -> torch.Tensor:
        values = job.contributed(piece, out)
        codec = codec_of(job.terms.codec, job.layout, piece.group)
        if codec.plain:
            return values
        codec.decode(codec.encode(values), out)
        return out

    return read
