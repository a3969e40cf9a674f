"""What holds a sync up besides its bytes, and what helps, in plain sentences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .._store._api import most_values
from .._store._drivers._uploads import MOST_PARTS
from .._store._transfer import PART_BYTES

if TYPE_CHECKING:
    from ._costs import Costs
    from ._model import Model

_FELT = 1.1  # how much longer a sync has to take before it is worth a sentence
_MANY = 128  # replicas
_FAIR_BYTES = 4 * 2**20  # of a shard: its transfer takes longer than the latency of its request


def limits(
    topology: str, costs: Costs, unlimited: Costs, model: Model, better: str = ""
) -> tuple[str, ...]:
    """What is to be said of a sync.

    Args:
        topology: Of the run.
        costs: What it costs.
        unlimited: What it would cost if the prefix took any number of requests.
        model: What is synced.
        better: The other topology and what it would make of a sync, where that is quicker.
    """
    said = []
    if model.values > most_values(MOST_PARTS * PART_BYTES):
        said.append(_too_large(model))
    if costs.seconds > _FELT * unlimited.seconds:
        said += _rate(costs, unlimited, model)
        reads, writes = _seconds(costs, model)
        if writes > reads / 2:
            said.append(
                "Many of the writes are parts of uploads, of 5 MiB each. Their number follows from the bytes and cannot be "
                "chosen: fewer replicas send fewer of them."
            )
        if topology == "sharded" and reads > writes / 2:
            said += _shards(model)
    if better:
        said.append(f"Another topology is quicker, {better}.")
    return tuple(said)


def _too_large(model: Model) -> str:
    largest = MOST_PARTS * PART_BYTES
    fragments = math.ceil(model.values / most_values(largest))
    return (
        f"Such a sync is refused when the run begins: its contributions of {model.values / 1e9:.3g} GB are too large for an "
        f"object, which can have {largest / 1e9:.0f} GB. Cut the model into {fragments} fragments or more, and plan the sync of "
        "one of them."
    )


def _rate(costs: Costs, unlimited: Costs, model: Model) -> list[str]:
    n, store, count = model.replicas, costs.store, costs.requests
    reads, writes = n * (count["GET"] + count["LIST"]), n * (count["PUT"] + count["DELETE"])
    return [
        f"The rate of requests below the prefix holds a sync up: it takes {costs.seconds:.3g} s, and would take "
        f"{unlimited.seconds:.3g} s without that limit. {n} replicas send {reads:,.0f} reads and {writes:,.0f} writes, of which "
        f"the prefix takes {_rate_of(store.reads)} and {_rate_of(store.writes)} per second.",
        "A longer sync_every makes such syncs rarer. So do fewer fragments: the sync of each sends as many requests.",
    ]


def _seconds(costs: Costs, model: Model) -> tuple[float, float]:
    """How long the prefix needs for the reads of all replicas, and for their writes."""
    count, n = costs.requests, model.replicas
    reads, writes = n * (count["GET"] + count["LIST"]), n * (count["PUT"] + count["DELETE"])
    return reads / costs.store.rate("GET"), writes / costs.store.rate("PUT")


def _shards(model: Model) -> list[str]:
    n, block = model.replicas, model.transfer.block_bytes
    few = max(math.isqrt(n), math.ceil(model.values / _FAIR_BYTES))
    if model.shard > block:
        return [
            f"Larger ranges are fewer reads: a shard has {model.shard / 1e6:.3g} MB, and is read in ranges of "
            f"{block / 1e6:.3g} MB at most (block_bytes of Transfer, an option of connect)."
        ]
    if n > _MANY and few < model.shards:
        return [
            f"There is a shard of {model.shard / 1e6:.3g} MB for every replica, and all replicas read all of them: {few} shards "
            "would need fewer requests. Their number follows from that of the replicas and cannot be chosen; fewer replicas "
            "send fewer requests, with the square of their number."
        ]
    return []


def _rate_of(rate: float | None) -> str:
    return "any number" if rate is None else f"{rate:,.0f}"
