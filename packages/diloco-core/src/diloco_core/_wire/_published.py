"""Published shards: the content of such a file, and how it is written and read.

The values of the shard are at the end of the file, so that they are located from there, and not by
what a header says::

    header | the outer optimizer's tensors | values | checksum of the values | checksum of the rest
    | checksum of both

The checksum of the rest covers every byte of the header and, through their own checksums, the outer
optimizer's tensors. It is next to the values, so that a replica that adopts the values also gets
this checksum, without another request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash

from .._arithmetic._layout import Piece
from .._arithmetic._sharded import Scratch, adopt_shard
from .._arithmetic._sync_job import SyncJob
from .._errors import CorruptedObjectError
from .._store._api import Buffer, ObjectReader
from ._safetensors import read_header
from ._sections import (
    CHECKSUM_BYTES,
    Parts,
    Section,
    SectionReader,
    header,
    result_of,
    section_bytes,
    section_parts,
    section_starts,
    sum_bytes,
    wrong_checksum,
)

# What follows the values: sections without tensors, which consist only of a checksum.
END = (Section("rest", (), 0), Section("both", (), 0))


class Sums(NamedTuple):
    """The checksums of a published file.

    Attributes:
        values: The checksum of the values.
        rest: The checksum of everything before the values.
    """

    values: int
    rest: int


@dataclass(eq=False)
class Shard:
    """One shard of a job's state: the outer optimizer's tensors, and the values.

    Args:
        job: The sync whose state it is.
        number: The number of the shard.
        seed: Returns the seed of a section's checksum, given what identifies the section.
        chunk_bytes: Number of bytes handled at once.
    """

    job: SyncJob
    number: int
    seed: Callable[..., int]
    chunk_bytes: int

    def parts(
        self, metadata: Mapping[str, str], written: Callable[[Sums], None] | None = None
    ) -> Generator[Buffer, None, Sums]:
        """The bytes of the file.

        Returns its checksums, with which ``written`` is called after the last byte was yielded.
        """
        rest = yield from self._before_values(metadata)
        sums = Sums((yield from self._values_parts()), rest)
        yield ending(sums)
        if written is not None:
            written(sums)
        return sums

    def digest(self) -> int:
        """The checksum of the values in memory."""
        return result_of(section_parts(self.values(), map(self.job.published, self._chunks())))

    def rest(self, metadata: Mapping[str, str]) -> int:
        """Return the checksum of what :meth:`parts` would now yield before the values.

        That is the header and the outer optimizer's tensors.
        """
        return result_of(self._before_values(metadata))

    def sums(self, metadata: Mapping[str, str]) -> Sums:
        """The checksums of the file that :meth:`parts` would now yield."""
        return result_of(self.parts(metadata))

    @property
    def adopted_bytes(self) -> int:
        """Return how many bytes of values a replica reads that adopts the shard."""
        return self.values().values_bytes(self.job.layout)

    def announce(self, reader: ObjectReader, origin: str) -> None:
        """Announce that the values of a file will be read, for stores that fetch ahead.

        Raises:
            CorruptedObjectError: The file is too short for the values.
        """
        self._values_of(reader, origin)

    def announce_rest(self, reader: ObjectReader) -> None:
        """Announce reads of all that comes before a file's values, for stores that fetch ahead."""
        stop = self.rest_bytes(reader.size)
        if stop > 0:
            reader.expect(0, stop)

    def rest_bytes(self, size: int) -> int:
        """Return how many bytes of a file of this size lie before what an adopting replica reads.

        They are the header and the outer state.
        """
        return size - section_starts(self.job.layout, self._sections(()))[-1]

    @property
    def writable(self) -> bool:
        """True if memory with values and outer state holds all that is needed to write the file."""
        return True

    def adopt(self, reader: ObjectReader, origin: str, scratch: Scratch) -> Sums:
        """Adopt the values of a file. Returns its checksums.

        Raises:
            CorruptedObjectError: The values in the file are damaged. The shard's values in memory
                are then undefined.
        """
        values = self._values_of(reader, origin)

        # The signature of a source
        def read(piece: Piece, out: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
            values.read(out)
            return out

        adopt_shard(self.job, self.number, read, self.chunk_bytes, scratch)
        return _verified(values, reader, origin)

    def announce_load(self, reader: ObjectReader, origin: str) -> None:
        """Announce what :meth:`load` will read; as :meth:`announce`."""
        self.announce(reader, origin)

    def load(
        self, reader: ObjectReader, origin: str, scratch: Scratch, expected: Sums | None = None
    ) -> Sums:
        """Adopt a file of a state that is loaded; as :meth:`adopt`.

        Args:
            reader: The open file.
            origin: What it is called in errors.
            scratch: Buffers.
            expected: What its checksums must be, if a record says so.
        """
        return as_recorded(self.adopt(reader, origin, scratch), expected, origin)

    def check(self, reader: ObjectReader, origin: str, scratch: Scratch) -> Sums:
        """Verify all of a file. Returns its checksums; nothing is adopted.

        Raises:
            CorruptedObjectError: The file is damaged.
        """
        self.described(reader, origin)
        values = self._values_of(reader, origin)
        for chunk in self._chunks():
            values.read(scratch.tensor(0, self.job.layout, chunk))
        return _verified(values, reader, origin)

    def described(
        self, reader: ObjectReader, origin: str, expected: int | None = None
    ) -> tuple[Mapping[str, str], dict[Piece, dict[str, torch.Tensor]], dict[str, float]]:
        """Read and verify the header's metadata and the outer optimizer's tensors and scalars.

        The tensors come chunk by chunk.

        Args:
            reader: The open file.
            origin: What the file is called in errors.
            expected: What :attr:`Sums.rest` must be, if that is known; otherwise the file's own
                checksum is taken.

        Raises:
            CorruptedObjectError: The file is damaged.
        """
        beginning, fields = read_header(reader, origin)
        names, scalars = _names_and_scalars(fields, origin)
        sections = self._sections(names)
        starts = [len(beginning) + start for start in section_starts(self.job.layout, sections)]
        if starts[-1] != reader.size:
            raise CorruptedObjectError(
                f"{origin} does not have the size that follows from its header: it is damaged"
            )
        rest = xxhash.xxh3_64(beginning, seed=self.seed("rest", self.number))
        chunks: dict[Piece, dict[str, torch.Tensor]] = {piece: {} for piece in self._outer_chunks()}
        reader.expect(starts[0], starts[len(names)])
        for section_of_name, start, name in zip(sections, starts, names, strict=False):
            section = SectionReader(reader, self.job.layout, section_of_name, start, origin)
            for piece, tensors in chunks.items():
                if not self.job.keeps_outer(piece, name):
                    continue
                dtype = self.job.layout.groups[piece.group].dtype
                tensors[name] = torch.empty(piece.numel, dtype=dtype, device="cpu")
                section.read(tensors[name])
            section.verify()
            rest.update(sum_bytes(section.digest))
        if rest.intdigest() != (end_sums(reader, origin).rest if expected is None else expected):
            raise CorruptedObjectError(
                f"{origin}: the checksum of its header and outer state is wrong. It is damaged, or "
                "it is not what the record of its sync says."
            )
        return fields["__metadata__"], chunks, scalars

    def values(self) -> Section:
        """The section of the values."""
        return Section(
            "values", self.job.layout.shard(self.number), self.seed("values", self.number)
        )

    def outer(self, name: str) -> Section:
        """The section of one of the outer optimizer's tensors."""
        pieces = filter(self._is_outer, self.job.layout.shard(self.number))
        outer = tuple(piece for piece in pieces if self.job.keeps_outer(piece, name))
        return Section(f"outer.{name}", outer, self.seed("outer", name, self.number))

    def _before_values(self, metadata: Mapping[str, str]) -> Parts:
        beginning, names = self._beginning(metadata)
        rest = xxhash.xxh3_64(beginning, seed=self.seed("rest", self.number))
        yield beginning
        for name in names:
            chunks = (each for each in self._outer_chunks() if self.job.keeps_outer(each, name))
            tensors = (self._outer_tensor(chunk, name) for chunk in chunks)
            rest.update(sum_bytes((yield from section_parts(self.outer(name), tensors))))
        return rest.intdigest()

    def _sections(self, names: Sequence[str]) -> list[Section]:
        """All sections of the file, given the names of the outer optimizer's tensors."""
        return [*map(self.outer, names), self.values(), *END]

    def _outer_tensor(self, chunk: Piece, name: str) -> torch.Tensor:
        """One of the outer optimizer's tensors for a chunk, as it is in the file."""
        return self.job.outer_state(chunk)[name]

    def _values_parts(self) -> Parts:
        """The bytes that follow the outer state: those of the values, and then their checksum."""
        return section_parts(self.values(), map(self.job.published, self._chunks()))

    def _beginning(self, metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
        """The header, and the names of the outer optimizer's tensors."""
        # All chunks of a flat vector have the same ones.
        first = {chunk.group: chunk for chunk in reversed(self._outer_chunks())}
        scalars: dict[str, float] = {}
        found: set[str] = set()
        for _, chunk in sorted(first.items()):
            found.update(self.job.outer_state(chunk))
            scalars.update(self.job.outer_scalars(chunk))
        names = sorted(found)
        sections = self._sections(names)
        metadata = {
            **metadata,
            "shard": str(self.number),
            "scalars": json.dumps(scalars),
            "outer": json.dumps(names),
        }
        return header(self.job.layout, sections, metadata), names

    def _values_of(self, reader: ObjectReader, origin: str) -> SectionReader:
        """Announce and open the values of a file, which are verified at their end."""
        values = self.values()
        start = reader.size - section_bytes(self.job.layout, values) - CHECKSUM_BYTES * len(END)
        section = SectionReader(reader, self.job.layout, values, start, origin)
        reader.expect(start, reader.size)
        return section

    def _chunks(self) -> list[Piece]:
        return list(self.job.layout.chunks(self.number, self.chunk_bytes))

    def _outer_chunks(self) -> list[Piece]:
        return list(filter(self._is_outer, self._chunks()))

    def _is_outer(self, piece: Piece) -> bool:
        # Not by the rule in the layout: the first sync of a fragment takes all values from rank 0,
        # but if the outer loop was loaded, there is outer state already. All that takes an outer
        # step must be finite. So must plain means, which have no outer state.
        return self.job.must_be_finite(piece)


def as_recorded(sums: Sums, expected: Sums | None, origin: str) -> Sums:
    """Return the checksums of a file after comparing them with those in its state's record.

    ``expected`` is None if the latter are not known.

    Raises:
        CorruptedObjectError: The file is undamaged, but is not the one that the record describes.
    """
    if expected is not None and sums != expected:
        raise CorruptedObjectError(
            f"{origin} is not what the record of its state says: its checksums are different"
        )
    return sums


WITHOUT = "without"
"""The header field of a published shard that names a contribution, by rank and epoch.

The contribution's part of the shard was lost, and counts as unchanged.
"""


def shard_metadata(job: SyncJob, sync: int, without: str = "") -> dict[str, str]:
    """The metadata in the header of a published shard, for people and other tools."""
    metadata = {"diloco": "state", "sync": str(sync), "name": job.name}
    return {**metadata, "fingerprint": job.fingerprint, **({WITHOUT: without} if without else {})}


def _names_and_scalars(fields: Any, origin: str) -> tuple[Sequence[str], dict[str, float]]:
    """The names of the outer optimizer's tensors, and its scalars, from a header."""
    try:
        metadata = fields["__metadata__"]
        names, scalars = json.loads(metadata["outer"]), json.loads(metadata["scalars"])
        if not all(isinstance(name, str) for name in [*names, *scalars]):
            raise TypeError("names must be text")
        return list(names), {name: float(value) for name, value in scalars.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise CorruptedObjectError(f"the header of {origin} is damaged") from None


def _verified(values: SectionReader, reader: ObjectReader, origin: str) -> Sums:
    """Verify the values of a file, all of which were read. Returns all checksums of the file."""
    sums = end_sums(reader, origin, values.padding)
    if sums.values != values.digest:
        raise wrong_checksum(origin, "the checksum of its values")
    return sums


def ending(sums: Sums) -> bytes:
    """The bytes that follow the checksum of the values in a file."""
    return sum_bytes(sums.rest) + sum_bytes(_both(*sums))


def end_sums(reader: ObjectReader, origin: str, padding: int = 0) -> Sums:
    """The checksums at the end of a file, which follow so many zeros after the values.

    What they cover is not read.

    Raises:
        CorruptedObjectError: They are damaged.
    """
    stored = bytearray(padding + 3 * CHECKSUM_BYTES)
    if reader.size < len(stored):
        raise CorruptedObjectError(f"{origin} has {reader.size} bytes: it is truncated")
    reader.read_into(reader.size - len(stored), memoryview(stored))
    if any(stored[:padding]):
        raise CorruptedObjectError(
            f"{origin}: the bytes between its values and their checksum are damaged"
        )
    values, rest, both = (
        int.from_bytes(stored[start : start + CHECKSUM_BYTES], "little")
        for start in range(padding, len(stored), CHECKSUM_BYTES)
    )
    if _both(values, rest) != both:
        raise CorruptedObjectError(f"{origin}: the checksums at its end are damaged")
    return Sums(values, rest)


def _both(values: int, rest: int) -> int:
    return xxhash.xxh3_64_intdigest(sum_bytes(values) + sum_bytes(rest))
