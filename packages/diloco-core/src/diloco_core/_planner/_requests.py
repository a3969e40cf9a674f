"""The requests of a sync, step by step as the exchanges send them: strict, sharded and gather.

All replicas begin at the same time, and none is late. A change to the order or number of requests of a sync must be made here
too: ``integration-tests/test_planned.py`` compares both.
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
    section = model.sent_shard + CHECKSUM_BYTES * math.ceil(model.shard / CHUNK_BYTES)
    costs.upload(
        (n - 1) * section + model.norms.size + model.header(n - 1),
        parts_at_once(model.transfer, budget),
    )
    costs.meet()
    costs.list(n)
    costs.ask("PUT")  # the record, by every replica that sees that all contributions are there
    costs.ask("GET")
    costs.read(model.norms.times(n - 1), budget)
    # A section that fits into one block is read together with its checksums; otherwise the checksums are read first.
    reads = 1 if section <= block else 1 + math.ceil(model.sent_shard / block)
    costs.read(Ranges(reads, section, min(section, block)).times(n - 1), budget)
    costs.ask("GET")  # the next claim of its rank: has the run been resumed without this replica?
    costs.ask("DELETE")
    costs.upload(model.published, parts_at_once(model.transfer, budget))
    costs.meet()
    costs.list(n)
    costs.read(model.adopted.times(n - 1), budget)
    costs.ask("GET", 2, by=1, times=1 / WATCH_EVERY)  # the manifest and its copy, by rank 0
    costs.requests["PUT"] += costs.seconds / Timing().beat_interval
    return costs


def sharded_sync(model: Model, store: StoreModel, bandwidth: float) -> Costs:
    """A sync of an elastic run in which shards have owners; see :class:`._adopt.Adoption`."""
    costs, n = Costs(store, model.transfer, model.replicas, bandwidth), model.replicas
    block, budget = model.transfer.block_bytes, model.transfer.budget_bytes
    own_shards = model.shards // n
    _commit(costs, model, budget)
    section = model.sent_shard + CHECKSUM_BYTES
    contributions = Ranges(math.ceil(section / block), section, min(section, block)).times(n - 1)
    costs.read(model.norms.times(n - 1), budget)
    costs.update(own_shards, contributions, model.published, creates_at_once(model.transfer))
    costs.meet()
    costs.list(model.shards)
    # The replica that created the record is ahead of the others, and lists once more.
    costs.requests["LIST"] += 1 / n
    costs.read(model.adopted.times(model.shards - own_shards), budget)
    costs.ask("PUT", by=1)  # the record that says that all shards are there
    # Of encoded state, the newest whole publication but one stays with all changes since: half of the time it is the newest.
    states = 3 if model.coded is None else 3 + (model.full_every - 1) / 2
    _collect(costs, model, states=states, contributions=3, deletes=1.0)
    return costs


def gather_sync(model: Model, publish_every: int, store: StoreModel, bandwidth: float) -> Costs:
    """A sync of an elastic run in which every replica updates all shards, as a mean over the syncs between two publications."""
    costs, n = Costs(store, model.transfer, model.replicas, bandwidth), model.replicas
    budget = model.transfer.gather_budget()
    now_and_then = 1 / publish_every
    _commit(costs, model, budget)
    # One sync publishes the state. The next one checks that it is there, and writes a record that says so.
    costs.create(
        model.shards / n, model.published, creates_at_once(model.transfer), times=now_and_then
    )
    costs.list(model.shards, by=1, times=now_and_then)
    costs.ask("GET", model.shards, by=1, times=now_and_then, at_once=model.transfer.connections)
    costs.ask("PUT", by=1, times=now_and_then)
    costs.read(model.norms.times(n - 1), budget)
    costs.read(model.gathered.times(n - 1), budget)
    _collect(costs, model, states=2.5, contributions=2.5 * publish_every, deletes=now_and_then)
    return costs


def _commit(costs: Costs, model: Model, budget: int) -> None:
    """A sync of an elastic run up to the reading of its record."""
    # The record (the others may have gone on without this replica), the next claim of its rank, and the record again.
    costs.ask("GET", 3)
    costs.upload(
        model.contribution
        + CHECKSUM_BYTES * model.shards
        + model.norms.size
        + model.header(model.shards),
        parts_at_once(model.transfer, budget),
    )
    costs.meet()
    costs.list(model.replicas)
    # Every replica tries to create the record. All but the first read it to compare it with theirs; then all read it.
    costs.ask("PUT")
    costs.ask("GET", by=model.replicas - 1)
    costs.ask("GET")
    costs.ask("GET", 3, times=1 / WATCH_EVERY)  # the manifest, its copy and the replica's claim


def _collect(
    costs: Costs, model: Model, *, states: float, contributions: float, deletes: float
) -> None:
    """One replica deletes what is no longer needed.

    Args:
        costs: What the sync costs.
        model: What is synced.
        states: How many published states the store holds.
        contributions: How many contributions of every replica it holds.
        deletes: The mean number of delete requests per sync.
    """
    costs.list(states * model.shards, by=1)
    costs.list(contributions * model.replicas, by=1)
    costs.ask("DELETE", by=1, times=deletes)
