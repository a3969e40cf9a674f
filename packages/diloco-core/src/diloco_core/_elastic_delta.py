"""The file of a contribution to an elastic sync: every shard of it, since any member may have to update any shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from ._errors import CorruptedObjectError
from ._sharded import contributions
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


class DeltaFormat:
    """What the contributions to a fragment look like. All have the same size; whose it is, its checksums say.

    Args:
        job: The fragment.

    Attributes:
        size: Size of a contribution in bytes.
    """

    def __init__(self, job: SyncJob) -> None:
        self._job = job
        self._sections = [self._section(shard, 0) for shard in range(job.layout.shards)]
        metadata = {"diloco": "delta", "name": job.name, "fingerprint": job.fingerprint}
        self._header = header(job.layout, self._sections, metadata)
        self.size = len(self._header) + section_starts(job.layout, self._sections)[-1]

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
        yield self._header
        layout = self._job.layout
        for shard in range(layout.shards):
            found = xxhash.xxh3_64(seed=base(shard).values().seed)
            chunks = contributions(self._job, shard, delta.rank, chunk_bytes, scratch, everything=True)

            def checked(
                values: Iterator[torch.Tensor] = chunks, shard: int = shard, found: xxhash.xxh3_64 = found
            ) -> Iterator[torch.Tensor]:
                for piece, value in zip(layout.chunks(shard, chunk_bytes), values, strict=True):
                    found.update(view(self._job.published(piece)))
                    yield value

            yield from section_parts(self._section(shard, self._seed(delta, shard)), checked())
            if found.intdigest() != sums[shard]:
                raise ChangedError(shard)

    def reader(self, delta: Delta, reader: ObjectReader, shard: int, origin: str) -> SectionReader:
        """A reader of one shard of a contribution."""
        section = self._section(shard, self._seed(delta, shard))
        if reader.size != self.size:
            raise CorruptedObjectError(
                f"{origin} has {reader.size} bytes, and not {self.size}: it is truncated or damaged"
            )
        return SectionReader(reader, self._job.layout, [section, *self._sections[shard + 1 :]], 0, origin)

    def _section(self, shard: int, checksum_seed: int) -> Section:
        return Section(f"shard.{shard}", self._job.layout.shard(shard), checksum_seed)

    def _seed(self, delta: Delta, shard: int) -> int:
        return seed(self._job.fingerprint, delta.key, shard)
