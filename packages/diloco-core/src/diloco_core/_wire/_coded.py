"""Published shards whose updates are encoded (:mod:`.._arithmetic._coded`).

What is in such a file::

    header | the outer optimizer's tensors, encoded | update, encoded | values | checksum of the
    values | ...

The end is as in :mod:`._published`. In most files the values are left out, but their checksum is
there: who adds the update to the values before must come to it. Values that take no outer step,
such as buffers, are in the update as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import xxhash

from .._arithmetic._coded import CodedUpdates
from .._arithmetic._layout import Layout, Piece
from .._arithmetic._sharded import Scratch
from .._codecs._codec import Codec
from .._errors import DivergedError
from .._store._api import ObjectReader
from ._published import END, Shard, Sums, as_recorded, end_sums
from ._sections import (
    CHECKSUM_BYTES,
    Parts,
    Section,
    SectionReader,
    section_bytes,
    section_parts,
    sum_bytes,
    view,
)


class EncodedUpdate:
    """The update in a file: read and verified whole, before any of it is added.

    Args:
        layout: How the tensors of the sync are cut into shards.
        number: The number of the shard.
        codec: How updates are encoded.
        seed: Seed of the checksum of the update.
        values: The section of the values after it; its pieces are empty where they are left out.
    """

    def __init__(
        self, layout: Layout, number: int, codec: Codec, seed: int, values: Section
    ) -> None:
        self.section = Section("update", layout.shard(number), seed, codec=codec)
        self._layout = layout
        self._number = number
        self._codec = codec
        self._values_seed = values.seed
        after = section_bytes(layout, values) + CHECKSUM_BYTES * len(END)
        self._before_end = section_bytes(layout, self.section) + after

    @property
    def size(self) -> int:
        """Size of the encoded update in bytes."""
        return self.section.values_bytes(self._layout)

    def start(self, size: int) -> int:
        """Return where the update begins in a file of this size."""
        return size - self._before_end

    def announce(self, reader: ObjectReader) -> None:
        """Announce that the update and its checksums will be read, for stores that fetch ahead."""
        start = self.start(reader.size)
        if start > 0:
            reader.expect(start, start + section_bytes(self._layout, self.section))

    def read(self, reader: ObjectReader, origin: str, chunk_bytes: int) -> torch.Tensor:
        """The bytes of the update, read and verified.

        Raises:
            CorruptedObjectError: They are damaged.
        """
        data = torch.empty(self.size, dtype=torch.uint8, device="cpu")
        whole = view(data)
        section = SectionReader(reader, self._layout, self.section, self.start(reader.size), origin)
        for offset in range(0, len(whole), chunk_bytes):
            section.read_encoded(whole[offset : offset + chunk_bytes])
        section.verify()
        return data

    def add(
        self,
        reader: ObjectReader,
        origin: str,
        chunk_bytes: int,
        values_of: Callable[[Piece], torch.Tensor],
        adopt: Callable[[Piece, torch.Tensor], object],
    ) -> int:
        """Add the update in a file to the values of the sync before.

        Args:
            reader: The open file.
            origin: What it is called in errors.
            chunk_bytes: Number of bytes handled at once.
            values_of: Returns the values of a chunk before the sync, which are changed. Values that
                take no outer step are set.
            adopt: Called with each chunk and its new values.

        Returns:
            The checksum of the new values.

        Raises:
            CorruptedObjectError: The update is damaged. Nothing was added.
        """
        # All of it is read and verified before any of it is added: values to which a part was added
        # could not be restored.
        data, start = self.read(reader, origin, chunk_bytes), 0
        digest = xxhash.xxh3_64(seed=self._values_seed)
        for chunk in self._layout.chunks(self._number, chunk_bytes):
            values = values_of(chunk)
            stop = start + self._layout.sent_bytes(chunk, self._codec)
            self._add_chunk(data[start:stop].clone(), chunk, values)  # aligned, as codecs expect it
            digest.update(view(values))
            adopt(chunk, values)
            start = stop
        return digest.intdigest()

    def _add_chunk(self, encoded: torch.Tensor, chunk: Piece, values: torch.Tensor) -> None:
        if self._layout.codec_of(chunk.group, self._codec) is self._codec:
            update = torch.empty_like(values)
            self._codec.decode(encoded, update)
            values += update
        else:
            view(values)[:] = view(encoded)


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
        seed, values = self.seed("update", self.number), self._stored_values()
        self._update = EncodedUpdate(self.job.layout, self.number, self.coded.codec, seed, values)

    @property
    def adopted_bytes(self) -> int:
        """Return how many bytes of values a replica reads that adopts the shard."""
        return self._update.size

    @property
    def writable(self) -> bool:
        """Say whether the encoded bytes are kept, so that the file can be written."""
        return self.coded.chunks.keys() >= set(self._outer_chunks())

    def rest_bytes(self, size: int) -> int:
        """Return the bytes of header and outer state before the update in a file of this size."""
        return self._update.start(size)

    # The signature of Shard
    def announce(self, reader: ObjectReader, origin: str) -> None:  # noqa: ARG002
        """Announce that the update in a file will be read, for stores that fetch ahead."""
        self._update.announce(reader)

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

        def values_of(chunk: Piece) -> torch.Tensor:
            values = self.job.destination(chunk)
            assert values is not None  # only fragments of a model are published in this way
            return values

        update = self._update
        if update.add(reader, origin, self.chunk_bytes, values_of, self.job.adopt) != sums.values:
            raise DivergedError(
                f"with the update in {origin}, this replica does not come to the values of the "
                "replica that published it: the two held different values before. The memory of "
                "one of them is damaged, or something has changed the tensors of its global copy. "
                "Start all ranks again with resume=True, which loads the values from the store."
            )
        return sums

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

    def check(
        self, reader: ObjectReader, origin: str, scratch: Scratch, *, whole: bool = False
    ) -> Sums:
        """Verify the update and the values of a file, and with ``whole`` also the rest.

        Returns its checksums.

        Raises:
            CorruptedObjectError: The file is damaged.
        """
        self._update.read(reader, origin, self.chunk_bytes)
        if self.full:
            return super().check(reader, origin, scratch, whole=whole)
        if whole:
            self.described(reader, origin)
        return end_sums(reader, origin)

    def outer(self, name: str) -> Section:
        """The section of one of the outer optimizer's tensors."""
        return replace(super().outer(name), codec=self.coded.codec)

    def _stored_values(self) -> Section:
        return self.values() if self.full else replace(self.values(), pieces=())

    def _sections(self, names: Sequence[str]) -> list[Section]:
        return [*map(self.outer, names), self._update.section, self._stored_values(), *END]

    def _outer_tensor(self, chunk: Piece, name: str) -> torch.Tensor:
        return self.coded.chunks[chunk].outer[name]

    def _encoded(self, chunk: Piece) -> torch.Tensor:
        return (
            self.coded.chunks[chunk].update if self._is_outer(chunk) else self.job.published(chunk)
        )

    def _values_parts(self) -> Parts:
        yield from section_parts(self._update.section, map(self._encoded, self._chunks()))
        if self.full:
            return (yield from super()._values_parts())
        digest = self.digest()
        yield sum_bytes(digest)
        return digest
