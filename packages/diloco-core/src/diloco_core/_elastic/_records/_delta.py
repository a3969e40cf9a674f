"""The file of a contribution to an elastic sync. It holds every shard, since any member may have to update any shard."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from ..._arithmetic._clip import norm_count
from ..._arithmetic._sharded import carries, contributions, may_carry
from ..._errors import CorruptedObjectError
from ..._store._api import ReadsAhead
from ..._wire._norms import announce_norms, norms_part, norms_section, read_norms
from ..._wire._sections import (
    Section,
    SectionReader,
    fingerprint,
    header,
    section_parts,
    section_starts,
    seed,
    view,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from ..._arithmetic._sharded import Scratch
    from ..._arithmetic._sync_job import SyncJob
    from ..._store._api import Buffer, ObjectReader
    from ..._wire._published import Shard
    from ._keys import Delta

_SCHEMA_DIGITS = 16


def schema(run: str, job: SyncJob) -> str:
    """What the keys of all contributions to a fragment have in common: a digest of the run's name and the fragment's fingerprint.

    It also enters the seeds of their checksums, which are made of the keys.
    """
    return fingerprint(run, job.fingerprint)[:_SCHEMA_DIGITS]


class ChangedError(Exception):
    """A shard of the global copy changed in memory. Never leaves the exchange."""


class _Plan(NamedTuple):
    """The files of contributions that carry the same groups."""

    header: bytes
    norms: Section | None
    norms_start: int
    sections: list[Section]
    starts: list[int]
    size: int


class DeltaFormat:
    """The format of contributions to a fragment. Contributions that carry the same groups have the same size.

    Args:
        job: The fragment.
    """

    def __init__(self, job: SyncJob) -> None:
        self._job = job
        self._plans: dict[int, _Plan] = {}

    def size(self, groups: int) -> int | None:
        """Size in bytes of a contribution that carries these groups; None if no contribution may carry exactly these."""
        return self._plan(groups).size if may_carry(self._job.layout, groups) else None

    def parts(
        self,
        delta: Delta,
        chunk_bytes: int,
        scratch: Scratch,
        base: Callable[[int], Shard],
        sums: Sequence[int],
    ) -> Iterator[Buffer]:
        """The parts of the file, made from the job's contribution.

        On the way, the global copy is compared with the checksums of what was published: it is in the processor's cache anyway.

        Args:
            delta: What the key of the contribution says.
            chunk_bytes: Bytes handled at once.
            scratch: Buffers.
            base: Returns a shard of the state from which the contribution is made, by number.
            sums: The checksums of these shards.

        Raises:
            ChangedError: The global copy is not what was published.
            NonFiniteDeltaError: The contribution holds NaN or infinity.
        """
        plan = self._plan(delta.groups)
        yield plan.header
        if plan.norms is not None:
            section = replace(plan.norms, seed=self._seed(delta, "norms"))
            yield norms_part(section, self._job.contribution.norms)
        layout, groups = self._job.layout, delta.groups
        for shard in range(layout.shards):
            checksum = xxhash.xxh3_64(seed=base(shard).values().seed)
            chunks = contributions(
                self._job,
                shard,
                delta.rank,
                chunk_bytes,
                scratch,
                everything=True,
                groups=groups,
                encoded=True,
            )

            def checked(
                values: Iterator[torch.Tensor] = chunks,
                shard: int = shard,
                checksum: xxhash.xxh3_64 = checksum,
            ) -> Iterator[torch.Tensor]:
                for piece in layout.chunks(shard, chunk_bytes):
                    value = next(values) if carries(groups, piece.group) else None
                    checksum.update(view(self._job.published(piece)))
                    if value is not None:
                        yield value

            yield from section_parts(
                self._section(shard, groups, self._seed(delta, shard)), checked()
            )
            if checksum.intdigest() != sums[shard]:
                raise ChangedError(shard)

    def reader(
        self, delta: Delta, reader: ObjectReader, shards: Iterable[int], origin: str
    ) -> DeltaReader:
        """A reader of some shards of a contribution, in file order; it reads only the groups that the contribution carries."""
        plan = self._plan(delta.groups)
        if reader.size != plan.size:
            raise CorruptedObjectError(
                f"{origin} has {reader.size} bytes, but should have {plan.size}: it is truncated or damaged"
            )
        layout = self._job.layout
        sections = {
            shard: SectionReader(
                reader,
                layout,
                replace(plan.sections[shard], seed=self._seed(delta, shard)),
                plan.starts[shard],
                origin,
            )
            for shard in shards
        }
        norms = plan.norms and replace(plan.norms, seed=self._seed(delta, "norms"))
        return DeltaReader(reader, sections, norms, plan.norms_start, origin)

    def _plan(self, groups: int) -> _Plan:
        if groups not in self._plans:
            layout = self._job.layout
            sections = [self._section(shard, groups, 0) for shard in range(layout.shards)]
            metadata = {
                "diloco": "delta",
                "name": self._job.name,
                "fingerprint": self._job.fingerprint,
            }
            norms = norms_section(norm_count(self._job), 0) if self._job.terms.clip else None
            in_order = [*filter(None, [norms]), *sections]
            beginning = header(layout, in_order, metadata)
            *starts, size = (len(beginning) + start for start in section_starts(layout, in_order))
            self._plans[groups] = _Plan(
                beginning, norms, starts[0], sections, starts[len(in_order) - len(sections) :], size
            )
        return self._plans[groups]

    def _section(self, shard: int, groups: int, checksum_seed: int) -> Section:
        pieces = (piece for piece in self._job.layout.shard(shard) if carries(groups, piece.group))
        return Section(f"shard.{shard}", tuple(pieces), checksum_seed, codec=self._job.terms.codec)

    def _seed(self, delta: Delta, section: int | str) -> int:
        return seed(self._job.fingerprint, delta.key, section)


class DeltaReader:
    """Reads shards of a contribution one after another, each piece by piece. Not thread-safe.

    Args:
        reader: The open file; it is not closed here.
        sections: The shards, in the order in which they are read.
        norms: The section of the norms, without which contributions are not clipped.
        norms_start: Where it begins in the file.
        origin: What the file is called in errors.
    """

    def __init__(
        self,
        reader: ObjectReader,
        sections: Mapping[int, SectionReader],
        norms: Section | None,
        norms_start: int,
        origin: str,
    ) -> None:
        self._reader = reader
        self._norms = norms
        self._norms_start = norms_start
        self._origin = origin
        # Looked up only once, because isinstance() with a protocol is slow.
        self._expect = reader.expect if isinstance(reader, ReadsAhead) else None
        self._sections = sections
        self._unread = list(sections.values())[::-1]

    def announce(self, sizes: Mapping[int, int]) -> None:
        """Tell the store what will be read next, if it can make use of that: for each shard, this number of bytes.

        What lies side by side in the file becomes one request.
        """
        if self._expect is None:
            return
        spans: list[tuple[int, int]] = []
        for shard, size in sizes.items():
            start, stop = self._sections[shard].span(size)
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, stop))
        for start, stop in spans:
            self._expect(start, stop)

    def announce_norms(self) -> None:
        """Tell the store that the norms will be read, before anything else is announced."""
        if self._norms is not None:
            announce_norms(self._reader, self._norms, self._norms_start)

    def norms(self) -> tuple[float, ...]:
        """The norms of the contribution's tensors, verified, before anything else is read.

        Raises:
            CorruptedObjectError: They are damaged.
        """
        assert self._norms is not None  # every contribution to a run with clipping has them
        return read_norms(self._reader, self._norms, self._norms_start, self._origin)

    def read(self, out: torch.Tensor) -> None:
        """Fill a contiguous CPU tensor with the next elements. Do not trust them before :meth:`verify`."""
        while self._unread[-1].finished:
            self._unread.pop()
        self._unread[-1].read(out)

    def verify(self, shard: int) -> None:
        """Verify the checksum of a shard.

        Raises:
            CorruptedObjectError: What was read is not what was written.
        """
        self._sections[shard].verify()
