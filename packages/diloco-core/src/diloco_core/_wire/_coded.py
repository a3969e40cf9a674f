"""Published shards whose updates are encoded (:mod:`.._arithmetic._coded`).

What is in such a file::

    header | the outer optimizer's tensors, encoded | update, encoded | values | checksum of the
    values | ...

The end is as in :mod:`._published`. In most files the values are left out, but their checksum is
there: who adds the update to the values before must come to it. Values that take no outer step,
such as buffers, are in the update as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import xxhash

from .._arithmetic._coded import CodedUpdates
from .._arithmetic._layout import Piece
from .._arithmetic._sharded import Scratch
from .._errors import DivergedError
from .._store._api import ObjectReader
from ._published import END, Shard, Sums, as_recorded, end_sums
from ._sections import (
    Parts,
    Section,
    SectionReader,
    section_bytes,
    section_parts,
    sum_bytes,
    view,
)


@dataclass(eq=False)
class CodedShard(Shard):
    """One shard of a job whose updates are encoded.

    Args:
        job: The sync whose state it is.
        number: The number of the shard.
        seed: Returns the seed of a section's checksum, given what identifies the section.
        chunk_bytes: Number of bytes handled at once.
        coded: How the job's state is published.
        full: Whether the file holds the values, too.
    """

    coded: CodedUpdates
    full: bool = field(kw_only=True)

    def __post_init__(self) -> None:
        pieces, seed = self.job.layout.shard(self.number), self.seed("update", self.number)
        self._update = Section("update", pieces, seed, codec=self.coded.codec)

    @property
    def adopted_bytes(self) -> int:
        """Return how many bytes of values a replica reads that adopts the shard."""
        return self._update.values_bytes(self.job.layout)

    @property
    def writable(self) -> bool:
        """Say whether the encoded bytes are kept, so that the file can be written."""
        return self.coded.chunks.keys() >= set(self._outer_chunks())

    # The signature of Shard
    def announce(self, reader: ObjectReader, origin: str) -> None:  # noqa: ARG002
        """Announce that the update in a file will be read, for stores that fetch ahead."""
        start = self.rest_bytes(reader.size)
        if start > 0:
            reader.expect(start, start + section_bytes(self.job.layout, self._update))

    # The signature of Shard
    def adopt(self, reader: ObjectReader, origin: str, scratch: Scratch) -> Sums:  # noqa: ARG002
        """Add the update in a file to the values of the sync before.

        Returns the checksums of the file.

        Raises:
            CorruptedObjectError: The update in the file is damaged. Nothing was added.
            DivergedError: The sum is not what the owner of the shard holds. It replaces the values
                before.
        """
        return self._add(reader, origin, None)

    def _add(self, reader: ObjectReader, origin: str, expected: Sums | None) -> Sums:
        sums = as_recorded(end_sums(reader, origin), expected, origin)
        if self._add_update(reader, origin) != sums.values:
            raise DivergedError(
                f"with the update in {origin}, this replica does not come to the values of the "
                "replica that published it: the two held different values before. The memory of "
                "one of them is damaged, or something has changed the tensors of its global copy. "
                "Start all ranks again with resume=True, which loads the values from the store."
            )
        return sums

    def _add_update(self, reader: ObjectReader, origin: str) -> int:
        """Add the update in a file to the values in memory. Returns the checksum of their sum."""
        layout, codec = self.job.layout, self.coded.codec
        # All of the update is read and verified before any of it is added: values to which a part
        # was added could not be restored.
        data, start = self._read_update(reader, origin), 0
        digest = xxhash.xxh3_64(seed=self.seed("values", self.number))
        for chunk in self._chunks():
            values = self.job.destination(chunk)
            assert values is not None  # only fragments of a model are published in this way
            stop = start + layout.sent_bytes(chunk, codec)
            encoded = data[start:stop].clone()  # aligned, as codecs expect it
            if layout.codec_of(chunk.group, codec) is codec:
                update = torch.empty_like(values)
                codec.decode(encoded, update)
                values += update
            else:
                view(values)[:] = view(encoded)
            digest.update(view(values))
            self.job.adopt(chunk, values)
            start = stop
        return digest.intdigest()

    def _read_update(self, reader: ObjectReader, origin: str) -> torch.Tensor:
        """The bytes of the update in a file, read and verified."""
        data = torch.empty(self.adopted_bytes, dtype=torch.uint8, device="cpu")
        whole, start = view(data), self.rest_bytes(reader.size)
        section = SectionReader(reader, self.job.layout, self._update, start, origin)
        for offset in range(0, len(whole), self.chunk_bytes):
            section.read_encoded(whole[offset : offset + self.chunk_bytes])
        section.verify()
        return data

    def announce_load(self, reader: ObjectReader, origin: str) -> None:
        """Announce what :meth:`load` will read, for stores that fetch ahead."""
        (super().announce if self.full else self.announce)(reader, origin)

    def load(
        self, reader: ObjectReader, origin: str, scratch: Scratch, expected: Sums | None = None
    ) -> Sums:
        """Adopt the values of a file if it holds them; otherwise add its update.

        Raises as :meth:`adopt` does.
        """
        if not self.full:
            return self._add(reader, origin, expected)
        return as_recorded(super().adopt(reader, origin, scratch), expected, origin)

    def check(self, reader: ObjectReader, origin: str, scratch: Scratch) -> Sums:
        """Verify all of a file. Returns its checksums.

        Raises:
            CorruptedObjectError: The file is damaged.
        """
        self._read_update(reader, origin)
        if self.full:
            return super().check(reader, origin, scratch)
        self.described(reader, origin)
        return end_sums(reader, origin)

    def outer(self, name: str) -> Section:
        """The section of one of the outer optimizer's tensors."""
        return replace(super().outer(name), codec=self.coded.codec)

    def _stored_values(self) -> Section:
        return self.values() if self.full else replace(self.values(), pieces=())

    def _sections(self, names: Sequence[str]) -> list[Section]:
        return [*map(self.outer, names), self._update, self._stored_values(), *END]

    def _outer_tensor(self, chunk: Piece, name: str) -> torch.Tensor:
        return self.coded.chunks[chunk].outer[name]

    def _encoded(self, chunk: Piece) -> torch.Tensor:
        return (
            self.coded.chunks[chunk].update if self._is_outer(chunk) else self.job.published(chunk)
        )

    def _values_parts(self) -> Parts:
        yield from section_parts(self._update, map(self._encoded, self._chunks()))
        if self.full:
            return (yield from super()._values_parts())
        digest = self.digest()
        yield sum_bytes(digest)
        return digest
