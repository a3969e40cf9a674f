"""What slows a sync down in addition to its bytes, and what helps, in plain sentences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .._store._api import most_values
from .._store._drivers._uploads import MOST_PARTS
from .._store._transfer import PART_BYTES

if TYPE_CHECKING:
    from ._costs import Costs
    from ._model import Model

_FELT = 1.1  # a sync must take this many times as long before the rate of requests is mentioned


def limits(costs: Costs, unlimited: Costs, model: Model, *, sharded: bool) -> list[str]:
    """Sentences on what slows a sync down.

    Args:
        costs: What the sync costs.
        unlimited: What it would cost if the prefix accepted any number of requests.
        model: What is synced.
        sharded: Whether the topology is sharded.
    """
    sentences = []
    largest = MOST_PARTS * PART_BYTES
    if model.values > most_values(largest):
        fragments = math.ceil(model.values / most_values(largest))
        sentences.append(
            f"Such a sync is refused when the run begins: each contribution has {model.values / 1e9:.3g} GB, which is too large "
            f"for one object (at most {largest / 1e9:.0f} GB). Cut the model into at least {fragments} fragments, and plan the "
            "sync of one of them."
        )
    if costs.seconds <= _FELT * unlimited.seconds:
        return sentences
    n, store, count = model.replicas, costs.store, costs.requests
    reads, writes = n * (count["GET"] + count["LIST"]), n * (count["PUT"] + count["DELETE"])
    sentences.append(
        f"The rate of requests below the prefix is limited, which slows a sync down: it takes {costs.seconds:.3g} s, and would "
        f"take {unlimited.seconds:.3g} s without that limit. The {n} replicas send {reads:,.0f} reads and {writes:,.0f} writes. "
        f"The prefix accepts {_rate_of(store.reads)} reads and {_rate_of(store.writes)} writes per second. A larger sync_every "
        "makes such syncs rarer. So do fewer fragments: the sync of one fragment sends about as many requests as that of the "
        "whole model. Fewer replicas send fewer."
    )
    block = model.transfer.block_bytes
    if (
        sharded
        and model.shard > block
        and reads / store.rate("GET") > writes / store.rate("PUT") / 2
    ):
        sentences.append(
            f"Larger ranges need fewer reads: a shard has {model.shard / 1e6:.3g} MB, and is read in ranges of at most "
            f"{block / 1e6:.3g} MB. To read larger ranges, use connect(transfer=Transfer(block_bytes=...))."
        )
    return sentences


def _rate_of(rate: float | None) -> str:
    return "any number" if rate is None else f"{rate:,.0f}"
