"""The requests of a sync, step by step as the exchange sends them, in both topologies.

All replicas begin at the same time, and none is late. A change to the order or number of requests of a sync must be made here
too: ``integration-tests/test_planned.py`` compares both.

The bytes are those of replicas that come to each point a moment after one another, as they do in most syncs: then one of them
writes the record of the sync. Requests and seconds are those of replicas that come at the very same time, where all of them
write the record: that takes longest. What no plan knows is how much longer a replica waits. It looks again at first 20 times
per second, then more rarely.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .._store._drivers._uploads import creates_at_once, parts_at_once
from .._timing import WATCH_EVERY, Timing
from ._costs import Costs, Ranges
from ._model import BEAT, END_BYTES

if TYPE_CHECKING:
    from ._costs import StoreModel
    from ._model import Model

_KEPT_SYNCS = 2
"""Contributions to so many syncs stay at least, since others may still read them."""


def sharded_sync(model: Model, store: StoreModel, bandwidth: float) -> Costs:
    """A sync in which shards have owners; see :class:`._adopt.Adoption`."""
    costs, n = Costs(store, model.transfer, model.replicas, bandwidth), model.replicas
    block, budget = model.transfer.block_bytes, model.transfer.budget_bytes
    own_shards = model.shards // n
    _commit(costs, model, budget)
    section = model.section
    reads = math.ceil(section / block)
    if model.fixed and section > block:
        # Where a section does not fit into one block, its checksums are read first.
        reads = 1 + math.ceil(model.sent_shard / block)
    costs.read(model.norms.times(n - 1), budget)
    contributions = Ranges(reads, section, min(section, block)).times(n - 1)
    costs.update(own_shards, contributions, model.published, creates_at_once(model.transfer))
    costs.meet()
    costs.list(model.shards)
    # The replica that created the record is ahead of the others, and lists once more.
    costs.requests["LIST"] += 1 / n
    costs.read(model.adopted.times(model.shards - own_shards), budget)
    # The record that says that all shards are there.
    costs.ask("PUT", size=model.done, by=1)
    # Of encoded state, the newest whole publication but one stays with all changes since: half of the time it is the newest.
    states = 3 if model.coded is None else 3 + (model.full_every - 1) / 2
    _collect(costs, model, states=states, contributions=_KEPT_SYNCS, deletes=1.0)
    if model.fixed:
        beats = costs.seconds / Timing().beat_interval
        costs.requests["PUT"] += beats
        costs.sent += beats * BEAT
    return costs


def gather_sync(model: Model, publish_every: int, store: StoreModel, bandwidth: float) -> Costs:
    """A sync of an elastic run in which every replica updates all shards, as a mean over the syncs between two publications."""
    costs, n = Costs(store, model.transfer, model.replicas, bandwidth), model.replicas
    budget, often = model.transfer.gather_budget(), 1 / publish_every
    _commit(costs, model, budget)
    # One sync publishes the state. The next one checks that it is there, and writes a record that says so.
    costs.create(model.shards / n, model.published, creates_at_once(model.transfer), often)
    costs.list(model.shards, by=1, times=often)
    connections = model.transfer.connections
    costs.ask("GET", model.shards, size=END_BYTES, by=1, times=often, at_once=connections)
    costs.ask("PUT", size=model.done, by=1, times=often)
    costs.read(model.norms.times(n - 1), budget)
    costs.read(model.gathered.times(n - 1), budget)
    # A state that is published is complete one sync and a half later, as a mean, and then the oldest of three goes. Of
    # contributions, those stay that came after the last state but one.
    contributions = 1.5 * publish_every + _KEPT_SYNCS + 0.5
    _collect(costs, model, states=2 + 1.5 * often, contributions=contributions, deletes=often)
    return costs


def _commit(costs: Costs, model: Model, budget: int) -> None:
    """A sync up to the reading of its record."""
    # The record (the others may have gone on without this replica), and the next claim of its rank; elastic: the record again.
    costs.ask("GET", 2 if model.fixed else 3)
    costs.upload(model.contributed, parts_at_once(model.transfer, budget))
    costs.meet()
    costs.list(model.replicas)
    # Every replica tries to create the record. All but the first read it to compare it with theirs; then all read it.
    costs.ask("PUT", size=model.commit / model.replicas)
    costs.ask("GET", by=model.replicas - 1)
    costs.ask("GET", size=model.commit)
    # Whether the manifest and its copy are still there, and whether the replica has a successor.
    costs.ask("GET", 3, size=model.watched / 3, times=1 / WATCH_EVERY)


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
    costs.list(states * (model.shards + 1), by=1)  # every state has a record, too
    costs.list(contributions * model.replicas, by=1)
    costs.ask("DELETE", by=1, times=deletes)
