"""The file of a contribution: a section per shard that is sent, with a checksum per chunk.

What is in such a file::

    header | norms of the tensors | shard, its checksums | shard, its checksums | ...

Norms are there only if contributions are clipped. They are there once, and not in every section: a
tensor may be in several shards, and most shards hold parts of several tensors.

The size of a file, and where everything is in it, follow from the tensors, the groups that it
carries and its contributor. So readers do not need the header, which is for people and other tools.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .._arithmetic._clip import norm_count
from .._arithmetic._layout import CHUNK_BYTES, Rule
from .._arithmetic._sharded import Scratch, carries, check_contribution, checked, may_carry
from .._arithmetic._sync_job import SyncJob
from .._store._api import Buffer, ObjectReader
from ._delta_reader import Again, Chunk, DeltaReader, Place, checksum, once
from ._sections import Section, header, padding_bytes, section_bytes, section_starts, seed, view

SUMMED_BYTES = CHUNK_BYTES
"""Bytes of values that have a checksum of their own.

Other than buffers, it is the same for all replicas of all runs.
"""


class Named(Protocol):
    """Name the contribution that a file holds."""

    @property
    def key(self) -> str:
        """The key of the file.

        Its checksums begin with it, so that no file is valid under another key.
        """

    @property
    def rank(self) -> int:
        """The contributor."""

    @property
    def groups(self) -> int:
        """The groups of values that it carries, as a bit mask."""


class _Plan(NamedTuple):
    """The files of contributions that carry the same groups, as if no shard was left out.

    Attributes:
        groups: The groups that are in the files, as a bit mask.
        norms: The section of the norms; None without clipping.
        shards: The section of each shard.
        starts: Where these begin in the file, and where the last one ends.
        beginning: The size of the header, which does not depend on which shards are left out.
    """

    groups: int
    norms: Section | None
    shards: list[Section]
    starts: list[int]
    beginning: int


@dataclass(eq=False)
class DeltaFormat:
    """The format of contributions to a sync. Not thread-safe.

    Args:
        job: What is synced.
        omit: Returns the shards that a rank leaves out of its contributions; they are only checked.
        sends_first: Returns whether a rank sends the groups of which only the values of one rank
            are used.
        verify_first: Whether readers verify every chunk before it is used, and read it again if it
            does not match; or a shard when all of it was used. Over a network, the former takes one
            more request for a shard that is larger than what one request reads.
    """

    job: SyncJob
    omit: Callable[[int], Sequence[int]] = lambda _: ()
    sends_first: Callable[[int], bool] = lambda _: True
    verify_first: bool = True

    def __post_init__(self) -> None:
        self._layout = self.job.layout
        self._plans: dict[int, _Plan] = {}

    def size(self, groups: int, rank: int = 0) -> int | None:
        """Return the size in bytes of a rank's contribution that carries these groups.

        Return None if no contribution may carry exactly these.
        """
        if not may_carry(self._layout, groups):
            return None
        return self._start(self._plan(groups, rank), rank, self._layout.shards)

    def sent(self, groups: int, rank: int) -> int:
        """Return the groups whose values are in the file of a contribution, as a bit mask.

        They are among those that the contribution carries.
        """
        if self.sends_first(rank):
            return groups
        first = (g for g, group in enumerate(self._layout.groups) if group.rule is Rule.FIRST)
        return groups & ~sum(1 << group for group in first)

    def parts(self, named: Named, scratch: Scratch) -> Iterator[Buffer]:
        """The parts of the file of this replica's contribution.

        All values are checked before the file is complete.

        Args:
            named: Which contribution it is.
            scratch: Buffers.

        Raises:
            NonFiniteDeltaError: The contribution holds NaN or infinity.
        """
        rank, plan = named.rank, self._plan(named.groups, named.rank)
        omitted = self.omit(rank)
        for shard in omitted:
            check_contribution(self.job, shard, rank, SUMMED_BYTES, scratch)
        shards = [shard for shard in range(self._layout.shards) if shard not in omitted]
        yield self._header(plan, shards)
        if plan.norms is not None:
            norms = struct.pack(f"<{plan.norms.numbers}d", *self.job.contribution.norms)
            yield norms + checksum(norms, self._seed(named, "norms"), 0)
        for shard in shards:
            first_seed, sums = self._seed(named, shard), list[bytes]()
            for piece in self._layout.chunks(shard, SUMMED_BYTES):
                if not carries(plan.groups, piece.group):
                    continue
                values = checked(self.job, piece, rank, scratch)
                codec = self._layout.codec_of(piece.group, self.job.terms.codec)
                data = view(codec.encode(values))
                sums.append(checksum(data, first_seed, len(sums)))
                yield data
            zeros = padding_bytes(plan.shards[shard].values_bytes(self._layout))
            yield bytes(zeros) + b"".join(sums)

    def reader(
        self,
        named: Named,
        shards: Iterable[int],
        origin: str,
        open_file: Callable[[int], ObjectReader],
        again: Again = once,
    ) -> DeltaReader:
        """A reader of some shards of a contribution, one after another.

        Args:
            named: Which contribution it is.
            shards: The shards, in the order in which they will be read.
            origin: What the file is called in errors.
            open_file: Opens the file, given its size.
            again: Calls a function that reads something, and repeats it after errors that may pass.
        """
        plan, rank, layout = self._plan(named.groups, named.rank), named.rank, self._layout

        def place(section: Section, start: int, number: int | str) -> Place:
            stop = start + section_bytes(layout, section)
            end = start + section.values_bytes(layout)
            return Place(start, end, stop, section.sums, self._seed(named, number), section.name)

        places = {
            shard: place(plan.shards[shard], self._start(plan, rank, shard), shard)
            for shard in shards
        }
        norms = None if plan.norms is None else place(plan.norms, plan.beginning, "norms")
        return DeltaReader(
            open_file,
            again,
            origin,
            self._start(plan, rank, layout.shards),
            norms,
            places,
            self._chunks(plan, places),
            verify_first=self.verify_first,
        )

    def _plan(self, groups: int, rank: int) -> _Plan:
        layout, groups = self._layout, self.sent(groups, rank)
        if groups not in self._plans:
            norms = norm_count(self.job) if self.job.terms.clip else None
            section = norms if norms is None else Section("norms", (), 0, numbers=norms)
            shards = []
            for shard in range(layout.shards):
                pieces = tuple(p for p in layout.shard(shard) if carries(groups, p.group))
                sums = sum(layout.chunk_count(piece, SUMMED_BYTES) for piece in pieces)
                shards.append(Section(f"shard.{shard}", pieces, 0, sums, self.job.terms.codec))
            plan = _Plan(groups, section, shards, [], 0)
            size = len(self._header(plan, range(layout.shards)))
            start = size + (0 if section is None else section_bytes(layout, section))
            starts = [start + offset for offset in section_starts(layout, shards)]
            self._plans[groups] = plan._replace(beginning=size, starts=starts)
        return self._plans[groups]

    def _start(self, plan: _Plan, rank: int, shard: int) -> int:
        """Return the start of a shard in a rank's file; after the last shard, the file's size."""
        before = (omitted for omitted in self.omit(rank) if omitted < shard)
        starts = plan.starts
        return starts[shard] - sum(starts[each + 1] - starts[each] for each in before)

    def _header(self, plan: _Plan, shards: Sequence[int]) -> bytes:
        sections = [*filter(None, [plan.norms]), *(plan.shards[shard] for shard in shards)]
        job = self.job
        metadata = {"diloco": "delta", "name": job.name, "fingerprint": job.fingerprint}
        return header(self._layout, sections, metadata, plan.beginning)

    def _chunks(self, plan: _Plan, shards: Iterable[int]) -> Iterator[Chunk]:
        for shard in shards:
            offset = number = 0
            for piece in self._layout.chunks(shard, SUMMED_BYTES):
                if carries(plan.groups, piece.group):
                    codec = self._layout.codec_of(piece.group, self.job.terms.codec)
                    yield Chunk(shard, number, offset, piece.numel, codec)
                    offset += self._layout.sent_bytes(piece, self.job.terms.codec)
                    number += 1

    def _seed(self, named: Named, section: int | str) -> int:
        return seed(self.job.fingerprint, named.key, section)
