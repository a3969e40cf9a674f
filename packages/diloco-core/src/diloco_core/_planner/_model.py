"""The sizes of all that is synced: contributions, shards, objects and records.

They are as exact as the costs of a sync depend on them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from .._arithmetic._layout import CHUNK_BYTES, Group, Layout, Rule, shards_of
from .._arithmetic._reduction import blocks
from .._codecs._codec import Codec
from .._codecs._plain import PLAIN
from .._store._transfer import Transfer, creates_at_once, parts_at_once
from .._timing import WATCH_EVERY, Timing
from .._wire._delta import SUMMED_BYTES
from .._wire._published import END
from .._wire._sections import CHECKSUM_BYTES, NUMBER_BYTES
from ._costs import Costs, Ranges, StoreModel

_WINDOW = 16  # how many blocks are laid out to see how chunks fill them
# Bytes, as they are in the middle of a run; tests compare them with those of real runs.
_CONTRIBUTION, _CONTRIBUTED_SHARD = 110, 165
"""The header of a contribution, and what it has for each shard."""
_PUBLICATION, _PUBLISHED_TENSOR = 320, 192
"""The header of a published shard, and what it has for the values and each outer tensor."""
_COMMIT, _MEMBER = 353, 159
"""The record of a sync, and what it has for each replica."""
_DONE, _SUMS = 92, 40
"""The additions of a complete state's record to that of its sync: once, and for each shard.

The manifest has the latter as well.
"""
_MANIFEST, _TENSOR = 950, 180
"""The manifest: the settings of the run, and what it has for each tensor."""
_CLAIM = 250
BEAT = 26
"""A sign of life."""
END_BYTES = CHECKSUM_BYTES * (1 + len(END))
"""The checksums at the end of a published shard."""


@dataclass(frozen=True)
class Model:
    """Describe what is synced, and by how many replicas. All sizes are in bytes.

    Attributes:
        values: Size of the model's values, and so of a contribution's before they are encoded.
        outer_state: Size of what the outer optimizer keeps for them.
        replicas: How many replicas there are.
        transfer: How the replicas read and write.
        fixed: Whether membership is fixed.
        codec: How contributions are sent.
        state_codec: The same for what owners publish: updates, residuals and outer state.
        full_every: If they are encoded: every so many syncs, an owner also publishes the values as
            they are.
        clip: Whether contributions are clipped, and so hold the norms of their tensors.
        tensors: How many tensors there are.
    """

    values: float
    outer_state: float
    replicas: int
    transfer: Transfer
    fixed: bool = False
    codec: Codec = PLAIN
    state_codec: Codec = PLAIN
    full_every: int = 1
    clip: bool = False
    tensors: int = 1

    @cached_property
    def shards(self) -> int:
        """The number of shards into which the values are cut."""
        return shards_of(math.ceil(self.values), self.replicas)

    @property
    def shard(self) -> float:
        """Size of a shard's values."""
        return self.values / self.shards

    @cached_property
    def sent(self) -> float:
        """The size of a contribution's encoded values, as a part of what it was before."""
        return self._encoded(self.codec)

    @cached_property
    def coded(self) -> float | None:
        """The same for what owners publish; None if it is published as it is."""
        return None if self.state_codec.plain else self._encoded(self.state_codec)

    def _encoded(self, codec: Codec) -> float:
        # Shards begin where blocks of the codec do, so that all but the last one have whole blocks.
        numel = max(1, round(self.values / torch.float32.itemsize))
        return codec.size(torch.float32, numel) / (numel * torch.float32.itemsize)

    @property
    def norms(self) -> Ranges:
        """Return what is read of the norms of a contribution's tensors."""
        size = CHECKSUM_BYTES + NUMBER_BYTES * self.tensors
        return Ranges(1, size, size) if self.clip else Ranges(0, 0, 0)

    @property
    def sent_shard(self) -> float:
        """Size of a shard's values in a contribution, as they are sent."""
        return self.shard * self.sent

    @property
    def section(self) -> float:
        """Bytes read of a shard in a contribution: its values as sent, and their checksums."""
        return self.sent_shard + CHECKSUM_BYTES * math.ceil(self.shard / SUMMED_BYTES)

    @property
    def contributed(self) -> float:
        """Size of a contribution.

        With fixed membership it lacks the shards that only its rank uses.
        """
        sections = self.shards - self.fixed * self.shards // self.replicas
        header = _CONTRIBUTION + _CONTRIBUTED_SHARD * self.shards
        return header + self.norms.size + sections * self.section

    @property
    def published(self) -> float:
        """Size of a published shard, as a mean over syncs."""
        tensors, content = self.outer_state / self.values + 1, self.values + self.outer_state
        if self.coded is not None:
            tensors += 1.5  # the residual and the update, and seldom the values
            content = self.coded * (content + self.values) + self.values / self.full_every
        header = _PUBLICATION + (_PUBLISHED_TENSOR + CHECKSUM_BYTES) * tensors
        return header + content / self.shards + END_BYTES

    @property
    def adopted(self) -> Ranges:
        """Return the reads of a published shard: its values or its update, and their checksums."""
        block = self.transfer.block_bytes
        if self.coded is None:
            size = self.shard + END_BYTES
            return Ranges(math.ceil(size / block), size, min(size, block))
        # The checksums at the end are read first: an update is added only if it fits.
        size = self.shard * self.coded + CHECKSUM_BYTES
        return Ranges(math.ceil(size / block) + 1, size + END_BYTES, min(size, block))

    @property
    def gathered(self) -> Ranges:
        """Return the reads of a whole contribution, a few chunks at a time."""
        numel = max(1, round(self.values / torch.float32.itemsize))
        layout = Layout((Group(torch.float32, numel, Rule.OUTER),), self.shards, self.codec.block)
        block_bytes = self.transfer.gather_block()
        window = min(self.shards, math.ceil(_WINDOW * block_bytes / self.shard))
        sizes = []
        for block in blocks(layout, range(window), CHUNK_BYTES, block_bytes):
            ends = sum(chunk.stop == layout.bound(0, shard + 1) for shard, chunk in block)
            values = sum(layout.piece_bytes(chunk) for _, chunk in block)
            sizes.append(self.sent * values + CHECKSUM_BYTES * ends)
        # A block has at least one chunk, which may be larger than what one request reads.
        requests = sum(math.ceil(size / self.transfer.block_bytes) for size in sizes)
        size, largest = self.shards * self.section, min(max(sizes), self.transfer.block_bytes)
        return Ranges(requests * self.shards / window, size, min(size, largest))

    @property
    def commit(self) -> float:
        """Size of the record of a sync."""
        return _COMMIT + _MEMBER * self.replicas

    @property
    def done(self) -> float:
        """Size of the record which says that all shards of a state are there."""
        return self.commit + _DONE + _SUMS * self.shards

    @property
    def watched(self) -> float:
        """Bytes that are read now and then: the manifest, its copy, and the replica's claim."""
        return 2 * (_MANIFEST + _SUMS * self.shards + _TENSOR * self.tensors) + _CLAIM


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
    # Fixed: whether the log goes on already.
    costs.ask("GET", by=n if model.fixed else 0)
    # The record that says that all shards are there.
    costs.ask("PUT", size=model.done, by=1)
    # Of encoded state, the newest whole publication but one stays with all changes since: half of
    # the time it is the newest.
    states = 3 if model.coded is None else 3 + (model.full_every - 1) / 2
    _collect(costs, model, states=states, contributions=_KEPT_SYNCS, deletes=1.0)
    if model.fixed:
        beats = costs.seconds / Timing().beat_interval
        costs.requests["PUT"] += beats
        costs.sent += beats * BEAT
    return costs


def gather_sync(model: Model, publish_every: int, store: StoreModel, bandwidth: float) -> Costs:
    """Return the costs of a sync of an elastic run in which every replica updates all shards.

    They are a mean over the syncs between two publications.
    """
    costs, n = Costs(store, model.transfer, model.replicas, bandwidth), model.replicas
    budget, often = model.transfer.gather_budget(), 1 / publish_every
    _commit(costs, model, budget)
    # One sync publishes the state. The next one checks that it is there, and writes a record that
    # says so.
    costs.create(model.shards / n, model.published, creates_at_once(model.transfer), often)
    costs.list(model.shards, by=1, times=often)
    connections = model.transfer.connections
    costs.ask("GET", model.shards, size=END_BYTES, by=1, times=often, at_once=connections)
    costs.ask("PUT", size=model.done, by=1, times=often)
    costs.read(model.norms.times(n - 1), budget)
    costs.read(model.gathered.times(n - 1), budget)
    # A state that is published is complete one sync and a half later, as a mean, and then the
    # oldest of three goes. Of contributions, those stay that came after the last state but one.
    contributions = 1.5 * publish_every + _KEPT_SYNCS + 0.5
    _collect(costs, model, states=2 + 1.5 * often, contributions=contributions, deletes=often)
    return costs


def _commit(costs: Costs, model: Model, budget: int) -> None:
    """A sync up to the reading of its record."""
    # The record (the others may have gone on without this replica), and the next claim of its rank;
    # elastic: the record again.
    costs.ask("GET", 2 if model.fixed else 3)
    costs.upload(model.contributed, parts_at_once(model.transfer, budget))
    costs.meet()
    costs.list(model.replicas)
    # Every replica tries to create the record. All but the first read it to compare it with theirs;
    # then all read it.
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
