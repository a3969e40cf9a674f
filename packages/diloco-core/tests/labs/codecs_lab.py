"""The codecs by name, what becomes of values in them, and the exchanges of a run over a store."""

import torch

from diloco_core import connect
from diloco_core._codecs._named import CODECS

SPARSE = ("topk64", "topk128")
DENSE = [name for name in CODECS if name not in (*SPARSE, "plain")]
TINY = torch.finfo(torch.float32).tiny


def decoded(codec, values):
    """Return what the others read where these values were sent."""
    codec = CODECS[codec] if isinstance(codec, str) else codec
    out = torch.full_like(values, torch.nan)
    codec.decode(codec.encode(values), out)
    return out


def random(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def over_store(folder, ranks=2, **options):
    return [connect(folder, rank=rank, world_size=ranks, **options) for rank in range(ranks)]
