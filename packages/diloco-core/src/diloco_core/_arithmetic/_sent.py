"""What of a contribution is sent, and in how many bytes. Only what takes an outer step is encoded; the rest is sent as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._codecs._plain import PLAIN
from ._layout import Rule

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from .._codecs._codec import Codec
    from ._layout import Layout, Piece
    from ._sync_job import SyncJob


def codec_of(codec: Codec, layout: Layout, group: int) -> Codec:
    """The codec by which a group is sent."""
    return codec if layout.groups[group].rule is Rule.OUTER else PLAIN


def sent_bytes(codec: Codec, layout: Layout, piece: Piece) -> int:
    """How many bytes a piece is on the wire. No other place says so."""
    return codec_of(codec, layout, piece.group).size(layout.groups[piece.group].dtype, piece.numel)


def as_sent(job: SyncJob) -> Callable[[Piece, torch.Tensor], torch.Tensor]:
    """The own contribution as all others add it up: encoded and decoded. Where that changes nothing, it is not done."""
    if job.codec.plain:
        return job.contribution

    def read(piece: Piece, out: torch.Tensor) -> torch.Tensor:
        values = job.contribution(piece, out)
        codec = codec_of(job.codec, job.layout, piece.group)
        if codec.plain:
            return values
        codec.decode(codec.encode(values), out)
        return out

    return read
