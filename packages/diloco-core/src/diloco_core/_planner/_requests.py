"""The requests of a sync, step by step as the exchange sends them, in both topologies.

All replicas begin at the same time, and none is late. A change to the order or number of requests of a sync must be made here
too: ``integration-tests/test_planned.py`` compares both.

The bytes are those of replicas that come to each point a moment after one another, as they do in most syncs. Then one of
them writes the record of the sync, and each of the others looks once in vain before it has to wait. Requests and seconds are
those of replicas that come at the very same time, where all of them write the record: that takes longest. What no plan
knows is how much longer a replica waits. It looks again at first 20 times per second, then more rarely; over HTTP this moves
about 430 bytes up and 630 down each time, and nothing in a folder.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .._store._drivers._uploads import creates_at_once, parts_at_once
from .._timing import WATCH_EVERY, Timing
from .._wire._published import END
from .._wire._sections import CHECKSUM_BYTES
from ._costs import Costs, Ranges
from ._records import BEAT

if TYPE_CHECKING:
    from ._model import Model
    from ._store_model import StoreModel

_KEPT_SYNCS = 2
"""Contributions to so many syncs stay at least, since others may still read them."""
_WRITERS = 1
"""How many replicas write the record of a sync, as far as its bytes are concerned."""


def sharded_sync(model: Model, store: StoreModel, bandwidth: float) -> Costs:
    """A sync in which shards have owners; see :class:`._adopt.Adoption`."""
    costs, n = Costs(store, model.transfer, model.replicas, bandwidth), model.replicas
    block, budget, records = model.transfer.block_bytes, model.transfer.budget_bytes, model.records
    own_shards = model.shards // n
    _commit(costs, model, budget)
    section = model.section
    reads = math.ceil(section / block)
    if model.fixed and section > block:
        # Where a section does not fit into one block, its checksums are read first.
        reads = 1 + math.ceil(model.sent_shard / block)
    contributions = Ranges(reads, section, min(section, block)).times(n - 1)
    costs.read(model.norms.times(n - 1), records.contribution_key, budget)
    costs.update(
        own_shards,
        contributions,
        records.contribution_key,
        model.published,
        records.published_key,
        creates_at_once(model.transfer),
    )
    costs.meet()
    _list_in_turn(costs, model.shards, records.published_key)
    costs.move("LIST", (n - 1) / n, records.published_key, model.shards)
    # The replica that created the record is ahead of the others, and lists once more.
    costs.requests["LIST"] += 1 / n
    costs.read(model.adopted.times(model.shards - own_shards), records.published_key, budget)
    # The record that says that all shards are there.
    costs.ask("PUT", key=records.record_key, content=records.done, by=1)
    # Of encoded state, the newest whole publication but one stays with all changes since: half of the time it is the newest.
    states = 3 if model.coded is None else 3 + (model.full_every - 1) / 2
    _collect(costs, model, states=states, contributions=_KEPT_SYNCS, published=1.0, deletes=1.0)
    if model.fixed:
        beats = costs.seconds / Timing().beat_interval
        up, down = store.around("PUT", records.record_key)
        costs.requests["PUT"] += beats
        costs.sent += beats * (up + BEAT)
        costs.received += beats * down
    return costs


def gather_sync(model: Model, publish_every: int, store: StoreModel, bandwidth: float) -> Costs:
    """A sync of an elastic run in which every replica updates all shards, as a mean over the syncs between two publications."""
    costs, n = Costs(store, model.transfer, model.replicas, bandwidth), model.replicas
    budget, records = model.transfer.gather_budget(), model.records
    now_and_then = 1 / publish_every
    _commit(costs, model, budget)
    # One sync publishes the state. The next one checks that it is there, and writes a record that says so.
    costs.create(
        model.shards / n,
        model.published,
        records.published_key,
        creates_at_once(model.transfer),
        times=now_and_then,
    )
    costs.list(model.shards, records.published_key, by=1, times=now_and_then)
    costs.ask(
        "GET",
        model.shards,
        key=records.published_key,
        content=CHECKSUM_BYTES * (1 + len(END)),
        by=1,
        times=now_and_then,
        at_once=model.transfer.connections,
    )
    costs.ask("PUT", key=records.record_key, content=records.done, by=1, times=now_and_then)
    costs.read(model.norms.times(n - 1), records.contribution_key, budget)
    costs.read(model.gathered.times(n - 1), records.contribution_key, budget)
    _collect(
        costs,
        model,
        # A state that is published is complete one sync and a half later, as a mean, and then the oldest of three goes. Of
        # contributions, those stay that came after the last state but one.
        states=2 + 1.5 * now_and_then,
        contributions=1.5 * publish_every + _KEPT_SYNCS + 0.5,
        published=now_and_then,
        deletes=now_and_then,
    )
    return costs


def _commit(costs: Costs, model: Model, budget: int) -> None:
    """A sync up to the reading of its record."""
    records = model.records
    # The record (the others may have gone on without this replica), and the next claim of its rank; elastic: the record again.
    costs.ask("GET", 2 if model.fixed else 3, key=records.record_key, absent=True)
    costs.upload(
        model.contributed,
        records.contribution_key,
        parts_at_once(model.transfer, budget),
    )
    costs.meet()
    _list_in_turn(costs, model.replicas, records.contribution_key)
    costs.move("GET", 1 - 1 / model.replicas, records.record_key, absent=True)
    # Every replica tries to create the record. All but the first read it to compare it with theirs; then all read it.
    costs.ask("PUT", key=records.record_key, content=records.commit, moved_by=_WRITERS)
    costs.ask("GET", by=model.replicas - 1, moved_by=0)
    costs.ask("GET", key=records.record_key, content=records.commit)
    _look(costs, model)
    costs.ask("GET", key=records.record_key, content=records.claim, times=1 / WATCH_EVERY)


def _list_in_turn(costs: Costs, keys: float, key: float) -> None:
    """List what all replicas write, each when it has written its share: the first one sees only that, the last one sees all."""
    costs.list(keys, key, seen=(1 + 1 / costs.replicas) / 2)


def _look(costs: Costs, model: Model, by: float | None = None) -> None:
    """Look whether the manifest and its copy are still there."""
    records = model.records
    costs.ask(
        "GET", 2, key=records.record_key, content=records.manifest, by=by, times=1 / WATCH_EVERY
    )


def _collect(
    costs: Costs,
    model: Model,
    *,
    states: float,
    contributions: float,
    published: float,
    deletes: float,
) -> None:
    """One replica deletes what is no longer needed.

    Args:
        costs: What the sync costs.
        model: What is synced.
        states: How many published states the store holds.
        contributions: How many contributions of every replica it holds.
        published: The mean number of states that are published in a sync.
        deletes: The mean number of delete requests per sync.
    """
    records = model.records
    # Every state has a record, too.
    costs.list(states * (model.shards + 1), records.published_key, by=1)
    costs.list(contributions * model.replicas, records.contribution_key, by=1)
    # As much is deleted as is added.
    added = published * (model.shards + 1), float(model.replicas)
    keys = sum(added)
    key = (added[0] * records.published_key + added[1] * records.contribution_key) / keys
    costs.ask("DELETE", key=key, keys=keys / deletes, by=1, times=deletes)
