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
_MANY = 128  # replicas
# A shard of this size takes longer to transfer than the latency of its request.
_FAIR_BYTES = 4 * 2**20


def limits(
    topology: str, costs: Costs, unlimited: Costs, model: Model, better: str = ""
) -> tuple[str, ...]:
    """Sentences on what slows a sync down.

    Args:
        topology: The topology of the run.
        costs: What the sync costs.
        unlimited: What it would cost if the prefix accepted any number of requests.
        model: What is synced.
        better: The other topology and how long a sync would take with it; empty if that is not quicker.
    """
    sentences = []
    if model.values > most_values(MOST_PARTS * PART_BYTES):
        sentences.append(_too_large(model))
    if costs.seconds > _FELT * unlimited.seconds:
        sentences += _rate(costs, unlimited, model)
        reads, writes = _seconds(costs, model)
        if writes > reads / 2:
            sentences.append(
                "Many of the writes are parts of uploads, of 5 MiB each. Their number depends only on the number of bytes that "
                "are uploaded, and cannot be chosen. Fewer replicas send fewer of them."
            )
        if topology == "sharded" and reads > writes / 2:
            sentences += _shards(model)
    if better:
        sentences.append(f"Another topology is quicker, {better}.")
    return tuple(sentences)


def _too_large(model: Model) -> str:
    largest = MOST_PARTS * PART_BYTES
    fragments = math.ceil(model.values / most_values(largest))
    return (
        f"Such a sync is refused when the run begins: each contribution has {model.values / 1e9:.3g} GB, which is too large for "
        f"one object (at most {largest / 1e9:.0f} GB). Cut the model into at least {fragments} fragments, and plan the sync of "
        "one of them."
    )


def _rate(costs: Costs, unlimited: Costs, model: Model) -> list[str]:
    n, store, count = model.replicas, costs.store, costs.requests
    reads, writes = n * (count["GET"] + count["LIST"]), n * (count["PUT"] + count["DELETE"])
    return [
        f"The rate of requests below the prefix is limited, which slows a sync down: it takes {costs.seconds:.3g} s, and would "
        f"take {unlimited.seconds:.3g} s without that limit. The {n} replicas send {reads:,.0f} reads and {writes:,.0f} writes. "
        f"The prefix accepts {_rate_of(store.reads)} reads and {_rate_of(store.writes)} writes per second.",
        "A larger sync_every makes such syncs rarer. So do fewer fragments: the sync of one fragment sends about as many "
        "requests as that of the whole model.",
    ]


def _seconds(costs: Costs, model: Model) -> tuple[float, float]:
    """The seconds that the prefix needs for the reads of all replicas, and for their writes."""
    count, n = costs.requests, model.replicas
    reads, writes = n * (count["GET"] + count["LIST"]), n * (count["PUT"] + count["DELETE"])
    return reads / costs.store.rate("GET"), writes / costs.store.rate("PUT")


def _shards(model: Model) -> list[str]:
    n, block = model.replicas, model.transfer.block_bytes
    few = max(math.isqrt(n), math.ceil(model.values / _FAIR_BYTES))
    if model.shard > block:
        return [
            f"Larger ranges need fewer reads: a shard has {model.shard / 1e6:.3g} MB, and is read in ranges of at most "
            f"{block / 1e6:.3g} MB. To read larger ranges, use connect(transfer=Transfer(block_bytes=...))."
        ]
    if n > _MANY and few < model.shards:
        return [
            f"There is a shard of {model.shard / 1e6:.3g} MB for every replica, and every replica reads all shards. {few} shards "
            "would need fewer requests, but the number of shards follows from the number of replicas and cannot be chosen. The "
            "number of requests grows with the square of the number of replicas."
        ]
    return []


def _rate_of(rate: float | None) -> str:
    return "any number" if rate is None else f"{rate:,.0f}"
