"""What is synced, as far as the costs of a sync depend on it: sizes of contributions, shards and objects."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from .._arithmetic._elastic_sizes import shards_of
from .._arithmetic._layout import CHUNK_BYTES, Group, Layout, Piece, Rule
from .._arithmetic._reduction import blocks
from .._codecs._plain import PLAIN
from .._wire._published import END
from .._wire._sections import CHECKSUM_BYTES, NUMBER_BYTES, Section, header
from ._costs import Ranges

if TYPE_CHECKING:
    from .._codecs._codec import Codec
    from .._store._transfer import Transfer

_WINDOW = 16  # how many blocks are laid out to see how chunks fill them
_SECTIONS = 32  # how many sections of a header are written to see how long they are
_TENSORS = 100  # how many tensors a model is taken to have; only their norms depend on it, of eight bytes each
_METADATA = {
    "diloco": "delta",
    "name": "model",
    "fingerprint": 32 * "0",
    "sync": "1000",
    "rank": "100",
}


@dataclass(frozen=True)
class Model:
    """What is synced, and by how many replicas. All sizes are in bytes.

    Attributes:
        values: Size of the model's values, and so of those of a contribution before they are encoded.
        outer_state: Size of what the outer optimizer keeps for them.
        replicas: How many replicas there are.
        shards: The number of shards into which the values are cut.
        transfer: How the replicas read and write.
        sent: The size of a contribution's values after they are encoded, as a part of what it was before.
        coded: The same for what owners publish: updates, residuals and outer state; None if values are published as they are.
        full_every: If they are encoded: every so many syncs, an owner also publishes the values as they are.
        clip: Whether contributions are clipped, and so hold the norms of their tensors.
    """

    values: float
    outer_state: float
    replicas: int
    shards: int
    transfer: Transfer
    sent: float = 1.0
    coded: float | None = None
    full_every: int = 1
    clip: bool = False

    @classmethod
    def of(
        cls,
        values: float,
        outer_state: float,
        replicas: int,
        transfer: Transfer,
        codec: Codec = PLAIN,
        state_codec: Codec = PLAIN,
        full_every: int = 1,
        *,
        strict: bool,
        clip: bool = False,
    ) -> Model:
        """The model of a strict run, or of an elastic one."""
        shards = replicas if strict else shards_of(math.ceil(values), replicas)
        elements = max(1, round(values / shards / torch.float32.itemsize))
        sent, coded = (
            each.size(torch.float32, elements) / (elements * torch.float32.itemsize)
            for each in (codec, state_codec)
        )
        return cls(
            values,
            outer_state,
            replicas,
            shards,
            transfer,
            sent,
            None if state_codec.plain else coded,
            full_every,
            clip,
        )

    @property
    def norms(self) -> Ranges:
        """What is read of the norms of a contribution's tensors."""
        size = CHECKSUM_BYTES + NUMBER_BYTES * _TENSORS
        return Ranges(1, size, size) if self.clip else Ranges(0, 0, 0)

    @property
    def shard(self) -> float:
        """Size of a shard's values."""
        return self.values / self.shards

    @property
    def contribution(self) -> float:
        """Size of the values of a contribution, as they are sent."""
        return self.values * self.sent

    @property
    def sent_shard(self) -> float:
        """Size of a shard's values in a contribution, as they are sent."""
        return self.shard * self.sent

    @property
    def published(self) -> float:
        """Size of a published shard, as a mean over syncs."""
        tensors = math.ceil(self.outer_state / self.values)
        content = self.values + self.outer_state
        if self.coded is not None:
            tensors += 2  # the residual and the update
            content = self.coded * (content + self.values) + self.values / self.full_every
        piece = (Piece(0, 0, self._layout.groups[0].numel),)
        sections = [
            *(Section(f"outer.{number}", piece, 0) for number in range(tensors)),
            Section("values", piece, 0),
        ]
        beginning = header(self._layout, [*sections, *END], _METADATA)
        sums = CHECKSUM_BYTES * (len(sections) + len(END))
        return len(beginning) + content / self.shards + sums

    @property
    def adopted(self) -> Ranges:
        """What is read from a published shard: its values or its update, and the checksums after them."""
        values = self.shard * (1 if self.coded is None else self.coded)
        size = values + CHECKSUM_BYTES * (1 + len(END))
        return Ranges(
            math.ceil(size / self.transfer.block_bytes), size, min(size, self.transfer.block_bytes)
        )

    @property
    def gathered(self) -> Ranges:
        """What a replica that needs a whole contribution reads from it."""
        block_bytes = self.transfer.gather_block()
        window = min(self.shards, math.ceil(_WINDOW * block_bytes / self.shard))
        requests, largest = 0, 0.0
        for block in blocks(self._layout, range(window), CHUNK_BYTES, block_bytes):
            values = self.sent * sum(self._layout.piece_bytes(chunk) for _, chunk in block)
            ends = sum(chunk.stop == self._layout.shard(shard)[-1].stop for shard, chunk in block)
            # A block has at least one chunk, which may be larger than what one request reads.
            requests += math.ceil((values + CHECKSUM_BYTES * ends) / self.transfer.block_bytes)
            largest = max(largest, min(values, self.transfer.block_bytes))
        size = self.contribution + CHECKSUM_BYTES * self.shards
        return Ranges(requests * self.shards / window, size, min(size, largest))

    def header(self, sections: int) -> float:
        """Size of the header of a contribution that has this number of sections.

        It is estimated from sections in the middle of the file, whose offsets have a typical number of digits.
        """
        middle = self.shards // 2
        before = Section("shard.0", (Piece(0, 0, max(1, self._layout.bound(0, middle))),), 0)
        sample = range(middle, min(middle + _SECTIONS, self.shards))
        sampled = [Section(f"shard.{number}", self._layout.shard(number), 0) for number in sample]
        without_sample = len(header(self._layout, [before], _METADATA))
        with_sample = len(header(self._layout, [before, *sampled], _METADATA))
        return without_sample + (with_sample - without_sample) / len(sample) * sections

    @cached_property
    def _layout(self) -> Layout:
        # The dtype does not matter: only the number of bytes does.
        values = Group(
            torch.float32, max(1, round(self.values / torch.float32.itemsize)), Rule.OUTER
        )
        return Layout((values,), self.shards)
