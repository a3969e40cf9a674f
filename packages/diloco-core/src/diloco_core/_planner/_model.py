"""What is synced, as far as the costs of a sync depend on it: sizes of contributions, shards and objects."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from .._arithmetic._layout import CHUNK_BYTES, Group, Layout, Piece, Rule
from .._arithmetic._reduction import blocks
from .._arithmetic._sent import sent_bytes
from .._arithmetic._shard_sizes import shards_of
from .._codecs._plain import PLAIN
from .._wire._delta import SUMMED_BYTES
from .._wire._published import END
from .._wire._sections import (
    CHECKSUM_BYTES,
    NUMBER_BYTES,
    Section,
    header,
    padding_bytes,
    section_bytes,
)
from ._costs import Ranges
from ._records import HEX, SYNC, records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._codecs._codec import Codec
    from .._store._transfer import Transfer
    from ._records import Records

_WINDOW = 16  # how many blocks are laid out to see how chunks fill them
_SECTIONS = 64  # how many sections of a file are laid out to see how long they and its header are
_NAMES = 64  # how many tensors of outer state are laid out
_FEW = 8  # up to how many shards are laid out, if not all of them are alike


@dataclass(frozen=True)
class Model:
    """What is synced, and by how many replicas. All sizes are in bytes.

    Attributes:
        values: Size of the model's values, and so of those of a contribution before they are encoded.
        outer_state: Size of what the outer optimizer keeps for them.
        replicas: How many replicas there are.
        shards: The number of shards into which the values are cut.
        transfer: How the replicas read and write.
        fixed: Whether membership is fixed.
        codec: How contributions are sent.
        state_codec: The same for what owners publish: updates, residuals and outer state.
        full_every: If they are encoded: every so many syncs, an owner also publishes the values as they are.
        clip: Whether contributions are clipped, and so hold the norms of their tensors.
        tensors: How many tensors there are.
    """

    values: float
    outer_state: float
    replicas: int
    shards: int
    transfer: Transfer
    fixed: bool = False
    codec: Codec = PLAIN
    state_codec: Codec = PLAIN
    full_every: int = 1
    clip: bool = False
    tensors: int = 1

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
        fixed: bool,
        clip: bool = False,
        tensors: int = 1,
    ) -> Model:
        """The model of a run."""
        shards = shards_of(math.ceil(values), replicas)
        return cls(
            values, outer_state, replicas, shards, transfer, fixed, codec, state_codec, full_every, clip, tensors,
        )  # fmt: skip

    @cached_property
    def sent(self) -> float:
        """The size of a contribution's values after they are encoded, as a part of what it was before."""
        return self._encoded(self.codec)

    @cached_property
    def coded(self) -> float | None:
        """The same for what owners publish; None if it is published as it is."""
        return None if self.state_codec.plain else self._encoded(self.state_codec)

    @cached_property
    def records(self) -> Records:
        """The records of a sync."""
        return records(
            replicas=self.replicas,
            shards=self.shards,
            tensors=self.tensors,
            full=self.coded is None,
            fixed=self.fixed,
        )

    @property
    def norms(self) -> Ranges:
        """What is read of the norms of a contribution's tensors."""
        size = CHECKSUM_BYTES + NUMBER_BYTES * self.tensors
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

    @cached_property
    def section(self) -> float:
        """What is read of a shard in a contribution: its values as they are sent, and the checksums after them."""
        few = [self._section(number) for number in range(self.shards)[:_FEW]]
        after = (
            section_bytes(self._layout, each) - each.values_bytes(self._layout) for each in few
        )
        return self.sent_shard + fmean(after)

    @cached_property
    def published(self) -> float:
        """Size of a published shard, as a mean over syncs."""
        count = math.ceil(self.outer_state / self.values)
        names = ["momentum_buffer", "exp_avg_sq", *map(str, range(_NAMES))][: min(count, _NAMES)]
        content, sums = self.values + self.outer_state, count + 1 + len(END)
        if self.coded is not None:
            names, sums = [*names, "residual"], sums + 2  # of the residual and of the update
            content = self.coded * (content + self.values) + self.values / self.full_every
        # Most shards are alike, but where there are few blocks of a codec, some are empty.
        few = range(self.shards)[:_FEW]
        beginning = fmean(len(self._header_of_published(shard, names)) for shard in few)
        if count > _NAMES:  # each further tensor has as many bytes of the header as those before it
            half = fmean(
                len(self._header_of_published(shard, names[_NAMES // 2 :])) for shard in few
            )
            beginning += (count - _NAMES) * (beginning - half) / (_NAMES // 2)
        return beginning + content / self.shards + CHECKSUM_BYTES * sums

    def _header_of_published(self, shard: int, names: Sequence[str]) -> bytes:
        """The header of a published shard that holds outer state with these names."""
        pieces, codec = self._layout.shard(shard), self.state_codec
        update = [] if self.coded is None else [Section("update", pieces, 0, codec=codec)]
        metadata = {
            **_metadata("state"),
            "sync": str(SYNC),
            "shard": str(shard),
            "scalars": "{}",
            "outer": json.dumps(names),
        }
        # If the publication is not a whole one, the values are left out.
        values = Section("values", pieces if self.full_every == 1 else (), 0)
        outer = [Section(f"outer.{name}", pieces, 0, codec=codec) for name in names]
        return header(self._layout, [*outer, *update, values, *END], metadata)

    @property
    def adopted(self) -> Ranges:
        """What is read from a published shard: its values or its update, and the checksums after them."""
        block, end = self.transfer.block_bytes, CHECKSUM_BYTES * (1 + len(END))
        if self.coded is None:
            size = self.shard + end
            return Ranges(math.ceil(size / block), size, min(size, block))
        # The checksums at the end are read first: an update is added only if it fits.
        few = (self._layout.shard(number) for number in range(self.shards)[:_FEW])
        sizes = (
            sum(sent_bytes(self.state_codec, self._layout, piece) for piece in pieces)
            for pieces in few
        )
        size = self.shard * self.coded + fmean(map(padding_bytes, sizes)) + CHECKSUM_BYTES
        return Ranges(math.ceil(size / block) + 1, size + end, min(size, block))

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
        size = self.shards * self.section
        return Ranges(requests * self.shards / window, size, min(size, largest))

    @cached_property
    def contributed(self) -> float:
        """Size of a contribution. With fixed membership it lacks the shards that only its rank uses."""
        sections = self.shards - self.fixed * self.shards // self.replicas
        return self._header_of_contribution() + self.norms.size + sections * self.section

    def _header_of_contribution(self) -> float:
        """Size of its header, which is as large as if no shard was left out.

        Where there are many shards, it is estimated from some in the middle of the file, whose offsets have a typical number
        of digits.
        """
        norms = [Section("norms", (), 0, numbers=self.tensors)] if self.clip else []

        def size(shards: Sequence[Section]) -> int:
            return len(header(self._layout, [*norms, *shards], _metadata("delta")))

        middle = (self.shards - min(self.shards, _SECTIONS)) // 2
        sample = [self._section(number) for number in range(middle, self.shards)[:_SECTIONS]]
        if self.shards <= len(sample):
            return size(sample)
        before = Section("shard.0", (Piece(0, 0, max(1, self._layout.bound(0, middle))),), 0)
        without_sample = size([before])
        each = (size([before, *sample]) - without_sample) / len(sample)
        return without_sample + each * self.shards

    def _section(self, number: int) -> Section:
        pieces = self._layout.shard(number)
        sums = sum(self._layout.chunk_count(piece, SUMMED_BYTES) for piece in pieces)
        return Section(f"shard.{number}", pieces, 0, sums, self.codec)

    def _encoded(self, codec: Codec) -> float:
        # Shards begin where blocks of the codec do, so that all but the last one have whole blocks.
        numel = self._layout.groups[0].numel
        return codec.size(torch.float32, numel) / (numel * torch.float32.itemsize)

    @cached_property
    def _layout(self) -> Layout:
        # The dtype does not matter: only the number of bytes does.
        values = Group(
            torch.float32, max(1, round(self.values / torch.float32.itemsize)), Rule.OUTER
        )
        return Layout((values,), self.shards, math.lcm(self.codec.block, self.state_codec.block))


def _metadata(kind: str) -> dict[str, str]:
    """What the headers of all files say."""
    return {"diloco": kind, "name": "0", "fingerprint": 2 * HEX}
