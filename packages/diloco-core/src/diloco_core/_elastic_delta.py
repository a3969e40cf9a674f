"""The file of a contribution to an elastic sync: every shard of it, since any member may have to update any shard."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import xxhash

from ._errors import CorruptedObjectError
from ._sharded import carries, contributions, may_carry
from ._wire import Section, SectionReader, header, section_parts, section_starts, seed, view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from ._elastic_records import Delta
    from ._exchange import SyncJob
    from ._published import Shard
    from ._sharded import Scratch
    from ._store import Buffer, ObjectReader

SCHEMA_DIGITS = 16
"""How much of a fragment's fingerprint the key of a contribution shows."""


class ChangedError(Exception):
    """A shard of the global copy changed in memory. Never leaves the exchange."""


class _Plan(NamedTuple):
    """The files of contributions that carry the same groups."""

    header: bytes
    sections: list[Section]
    size: int


class DeltaFormat:
    """What the contributions to a fragment look like. Those that carry the same groups have the same size.

    Args:
        job: The fragment.
    """

    def __init__(self, job: SyncJob) -> None:
        self._job = job
        self._plans: dict[int, _Plan] = {}

    def size(self, groups: int) -> int | None:
        """Size in bytes of a contribution that carries these groups; None where none may carry just these."""
        return self._plan(groups).size if may_carry(self._job.layout, groups) else None

    def parts(
        self, delta: Delta, chunk_bytes: int, scratch: Scratch, base: Callable[[int], Shard], sums: Sequence[int]
    ) -> Iterator[Buffer]:
        """The file, from the job's contribution.

        On the way the global copy that it is taken from is compared with the checksums of what was published: here it is in
        the processor's cache anyway.

        Args:
            delta: Whose it is.
            chunk_bytes: Bytes handled at once.
            scratch: Buffers.
            base: The shards of the state that it is made from.
            sums: Their checksums.

        Raises:
            ChangedError: The global copy is not what was published.
            NonFiniteDeltaError: It holds NaN or infinity.
        """
        yield self._plan(delta.groups).header
        layout, groups = self._job.layout, delta.groups
        for shard in range(layout.shards):
            found = xxhash.xxh3_64(seed=base(shard).values().seed)
            chunks = contributions(self._job, shard, delta.rank, chunk_bytes, scratch, everything=True, groups=groups)

            def checked(
                values: Iterator[torch.Tensor] = chunks, shard: int = shard, found: xxhash.xxh3_64 = found
            ) -> Iterator[torch.Tensor]:
                for piece in layout.chunks(shard, chunk_bytes):
                    value = next(values) if carries(groups, piece.group) else None
                    found.update(view(self._job.published(piece)))
                    if value is not None:
                        yield value

            yield from section_parts(self._section(shard, groups, self._seed(delta, shard)), checked())
            if found.intdigest() != sums[shard]:
                raise ChangedError(shard)

    def reader(self, delta: Delta, reader: ObjectReader, shard: int, origin: str) -> SectionReader:
        """A reader of one shard of a contribution: of the groups that it carries."""
        section = self._section(shard, delta.groups, self._seed(delta, shard))
        plan = self._plan(delta.groups)
        if reader.size != plan.size:
            raise CorruptedObjectError(
                f"{origin} has {reader.size} bytes, and not {plan.size}: it is truncated or damaged"
            )
        return SectionReader(reader, self._job.layout, [section, *plan.sections[shard + 1 :]], 0, origin)

    def _plan(self, groups: int) -> _Plan:
        if groups not in self._plans:
            layout = self._job.layout
            sections = [self._section(shard, groups, 0) for shard in range(layout.shards)]
            metadata = {"diloco": "delta", "name": self._job.name, "fingerprint": self._job.fingerprint}
            beginning = header(layout, sections, metadata)
            self._plans[groups] = _Plan(beginning, sections, len(beginning) + section_starts(layout, sections)[-1])
        return self._plans[groups]

    def _section(self, shard: int, groups: int, checksum_seed: int) -> Section:
        pieces = (piece for piece in self._job.layout.shard(shard) if carries(groups, piece.group))
        return Section(f"shard.{shard}", tuple(pieces), checksum_seed)

    def _seed(self, delta: Delta, shard: int) -> int:
        return seed(self._job.fingerprint, delta.key, shard)
