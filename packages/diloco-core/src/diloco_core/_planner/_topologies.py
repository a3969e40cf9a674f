"""What a sync costs, told as the exchanges do it: strict, sharded and gather. All replicas begin at once, and nobody is late.

Whoever changes the order or number of requests of a sync changes it here too; ``integration-tests/test_planned.py`` compares.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .._arithmetic._layout import CHUNK_BYTES
from .._store._drivers._uploads import creates_at_once, parts_at_once
from .._timing import WATCH_EVERY, Timing
from .._wire._sections import CHECKSUM_BYTES
from ._costs import Costs, Ranges

if TYPE_CHECKING:
    from ._costs import StoreModel
    from ._model import Model


def strict_sync(model: Model, store: StoreModel, bandwidth: float) -> Costs:
    """A sync of a strict run; see :class:`._strict._sync.StoreSync`."""
    costs, n = Costs(store, model.transfer, model.replicas, bandwidth), model.replicas
    block, budget = model.transfer.block_bytes, model.transfer.budget_bytes
    section = model.shard + CHECKSUM_BYTES * math.ceil(model.shard / CHUNK_BYTES)
    costs.upload((n - 1) * section + model.header(n - 1), parts_at_once(model.transfer, budget))
    costs.meet()
    costs.list(n)
    costs.ask("PUT")  # the record, by everybody who sees that all contributions are there
    costs.ask("GET")
    costs.ask("DELETE")
    # A section of one block comes with its checksums; otherwise they are read first.
    reads = 1 if section <= block else 1 + math.ceil(model.shard / block)
    costs.read(Ranges(reads, section, min(section, block)).times(n - 1), budget)
    costs.upload(model.published, parts_at_once(model.transfer, budget))
    costs.meet()
    costs.list(n)
    costs.read(model.adopted.times(n - 1), budget)
    costs.requests["PUT"] += costs.seconds / Timing().beat_interval
    return costs


def sharded_sync(model: Model, store: StoreModel, bandwidth: float) -> Costs:
    """A sync of an elastic run with owners of shards; see :class:`._adopt.Adoption`."""
    costs, n = Costs(store, model.transfer, model.replicas, bandwidth), model.replicas
    block, budget = model.transfer.block_bytes, model.transfer.budget_bytes
    own = model.shards // n
    _commit(costs, model, budget)
    section = model.shard + CHECKSUM_BYTES
    contributions = Ranges(math.ceil(section / block), section, min(section, block)).times(n - 1)
    costs.update(own, contributions, model.published, creates_at_once(model.transfer))
    costs.meet()
    costs.list(model.shards)
    costs.requests["LIST"] += 1 / n  # by who has created the record, and is ahead of the others
    costs.read(model.adopted.times(model.shards - own), budget)
    costs.ask("PUT", by=1)  # the record that all shards are there
    _collect(costs, model, states=3, contributions=3, deletes=1.0)
    return costs


def gather_sync(model: Model, publish_every: int, store: StoreModel, bandwidth: float) -> Costs:
    """A sync of an elastic run in which everybody updates everything, as a mean over those between two publications."""
    costs, n = Costs(store, model.transfer, model.replicas, bandwidth), model.replicas
    budget = model.transfer.gather_budget()
    now_and_then = 1 / publish_every
    _commit(costs, model, budget)
    # In one sync the state is published; in the next one it is looked at, and a record says that it is there.
    costs.create(
        model.shards / n, model.published, creates_at_once(model.transfer), times=now_and_then
    )
    costs.list(model.shards, by=1, times=now_and_then)
    costs.ask("GET", model.shards, by=1, times=now_and_then, at_once=model.transfer.connections)
    costs.ask("PUT", by=1, times=now_and_then)
    costs.read(model.gathered.times(n - 1), budget)
    _collect(costs, model, states=2.5, contributions=2.5 * publish_every, deletes=now_and_then)
    return costs


def _commit(costs: Costs, model: Model, budget: int) -> None:
    """A sync of an elastic run until its record is read."""
    # Whether others have gone on without this replica, whether its rank is still its own, and the first again.
    costs.ask("GET", 3)
    costs.upload(
        model.values + CHECKSUM_BYTES * model.shards + model.header(model.shards),
        parts_at_once(model.transfer, budget),
    )
    costs.meet()
    costs.list(model.replicas)
    costs.ask("PUT")  # the record, which everybody tries to create
    costs.ask("GET", by=model.replicas - 1)  # to compare it, by those who were not the first
    costs.ask("GET")
    costs.ask("GET", 2, times=1 / WATCH_EVERY)  # the manifest and the own claim


def _collect(
    costs: Costs, model: Model, *, states: float, contributions: float, deletes: float
) -> None:
    """One replica removes what nobody needs: so many states and contributions of every replica are there."""
    costs.list(states * model.shards, by=1)
    costs.list(contributions * model.replicas, by=1)
    costs.ask("DELETE", by=1, times=deletes)
