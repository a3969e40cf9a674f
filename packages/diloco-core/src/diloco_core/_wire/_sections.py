"""The two kinds of payload objects: deltas and state shards. Both are valid safetensors files, both are checksummed.

A file is a sequence of *sections*; a section is one tensor per piece, zeros up to a multiple of eight bytes, and then
eight bytes: the xxh3-64 of the piece bytes (little endian). The checksum stands behind its data, so that a writer needs one
pass and one ranged read brings both. Its seed binds the section to the run's schema, the sync, the writer and the shard: a
valid section in the wrong place fails too.

Where a section lies follows from the layout and from the size of the file alone, counted from the end, so nothing that a
reader does depends on the header: that is there for people and other tools, and for what :mod:`._published` puts into it.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from .._arithmetic._sent import codec_of, sent_bytes
from .._codecs._plain import PLAIN
from .._errors import CorruptedObjectError
from ._safetensors import LENGTH_BYTES, entry, header_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from .._arithmetic._layout import Layout, Piece
    from .._codecs._codec import Codec
    from .._store._api import Buffer, ObjectReader

CHECKSUM_BYTES = 8
# Sections begin at multiples of this many bytes, so that other tools can map every tensor of a file, of whatever dtype.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Section:
    """A checksummed part of a file.

    Attributes:
        name: What the tensors are called: ``<name>.<group>`` and ``<name>.xxh3``.
        pieces: The pieces it holds, in file order.
        seed: Seed of its checksum.
        sums: How many checksums end it, of eight bytes each; the last one is of all its bytes.
        codec: How its values are encoded.
    """

    name: str
    pieces: tuple[Piece, ...]
    seed: int
    sums: int = 1
    codec: Codec = PLAIN

    def values_bytes(self, layout: Layout) -> int:
        """Size of its pieces in bytes, without padding and checksums."""
        return sum(sent_bytes(self.codec, layout, piece) for piece in self.pieces)


def fingerprint(*identity: object) -> str:
    """A digest of anything that JSON can express: 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(json.dumps(identity).encode())


def seed(*identity: object) -> int:
    """A checksum seed that says what a section is."""
    return xxhash.xxh3_64_intdigest(json.dumps(identity).encode())


def view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable and not copied."""
    if not tensor.numel():
        return memoryview(bytearray())
    # As bytes, because numpy does not know every dtype; and it declares the buffer protocol from Python 3.12 on.
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def section_starts(layout: Layout, sections: Iterable[Section]) -> list[int]:
    """Byte offset of every section within the data of a file, and the size of the data last."""
    starts = [0]
    for section in sections:
        starts.append(starts[-1] + section_bytes(layout, section))
    return starts


def _padding(size: int) -> int:
    """How many zeros follow so many bytes of pieces."""
    return -size % _ALIGNMENT


def header(layout: Layout, sections: Sequence[Section], metadata: Mapping[str, str]) -> bytes:
    """The safetensors header of a file, its length included."""
    tensors: dict[str, object] = {}
    for section, start in zip(sections, section_starts(layout, sections), strict=False):
        offset = start
        for piece in section.pieces:
            end = offset + sent_bytes(section.codec, layout, piece)
            plain = codec_of(section.codec, layout, piece.group).plain
            dtype = layout.groups[piece.group].dtype if plain else torch.uint8
            shape = [piece.numel if plain else end - offset]
            tensors[f"{section.name}.{piece.group}"] = entry(dtype, shape, offset, end)
            offset = end
        end = offset + _padding(offset - start) + CHECKSUM_BYTES * section.sums
        tensors[f"{section.name}.xxh3"] = entry(torch.uint8, [end - offset], offset, end)
    return header_bytes(tensors, metadata)


def section_bytes(layout: Layout, section: Section) -> int:
    """Size of a section in bytes, padding and checksums included."""
    size = section.values_bytes(layout)
    return size + _padding(size) + CHECKSUM_BYTES * section.sums


class ValuesDecoder:
    """Fills tensors with the values of a section, from its bytes. Thread-safe.

    Args:
        layout: The plan of the sync.
        section: The section.

    Attributes:
        size: Bytes of all its values.
    """

    def __init__(self, layout: Layout, section: Section) -> None:
        sizes = [sent_bytes(section.codec, layout, piece) for piece in section.pieces]
        self.size = sum(sizes)
        self._ends = [] if section.codec.plain else list(accumulate(sizes))
        self._codecs = [codec_of(section.codec, layout, piece.group) for piece in section.pieces]

    def fill(
        self, offset: int, out: torch.Tensor, read_into: Callable[[memoryview], None]
    ) -> memoryview:
        """Read the bytes of a chunk, and fill a contiguous CPU tensor with its values.

        Args:
            offset: Where in the section they begin.
            out: The tensor.
            read_into: Reads so many bytes.

        Returns:
            The bytes that were read.
        """
        codec = self._codecs[bisect_right(self._ends, offset)] if self._ends else PLAIN
        if codec.plain:
            buffer = view(out)
            read_into(buffer)
            return buffer
        data = torch.empty(codec.size(out.dtype, out.numel()), dtype=torch.uint8, device="cpu")
        buffer = view(data)
        read_into(buffer)
        codec.decode(data, out)
        return buffer


class SectionReader:
    """Reads one section piece by piece and verifies it at the end. Not thread-safe.

    Args:
        reader: The open file.
        layout: The plan of the sync.
        section: The section.
        start: Where it begins in the file.
        origin: Name of the object, for errors.

    Raises:
        CorruptedObjectError: The file is too short for it.
    """

    def __init__(
        self, reader: ObjectReader, layout: Layout, section: Section, start: int, origin: str
    ) -> None:
        if start < LENGTH_BYTES:
            raise CorruptedObjectError(
                f"{origin} has {reader.size} bytes, which is too few: it is truncated, or was written for another model"
            )
        self._reader = reader
        self._start = self._offset = self._announced = start
        self._values = ValuesDecoder(layout, section)
        self._end = start + self._values.size
        self._stop = start + section_bytes(layout, section)
        self._hash = xxhash.xxh3_64(seed=section.seed)
        self._ending: bytes | None = None
        self._origin = f"{origin}, section {section.name}"

    def span(self, size: int | None = None) -> tuple[int, int]:
        """Where the next ``size`` bytes of its pieces lie in the file (None: all that are left), to announce them.

        With the last ones come padding and checksum.
        """
        start = self._announced
        stop = self._end if size is None else start + size
        self._announced = self._stop if stop == self._end else stop
        return start, self._announced

    def read(self, out: torch.Tensor) -> None:
        """Fill a contiguous CPU tensor with the next elements. They are not to be trusted before :meth:`verify`."""
        offset = self._offset
        buffer = self._values.fill(
            offset - self._start, out, lambda into: self._reader.read_into(offset, into)
        )
        self._hash.update(buffer)
        self._offset += len(buffer)
        if self.finished:
            self._read_ending()  # it came with the last piece, whose memory is wanted for what comes next

    @property
    def finished(self) -> bool:
        """Whether all pieces have been read."""
        return self._offset == self._end

    @property
    def digest(self) -> int:
        """Checksum of what was read so far."""
        return self._hash.intdigest()

    @property
    def padding(self) -> int:
        """How many zeros follow what was read so far, if that is all."""
        return _padding(self._offset - self._start)

    def verify(self) -> None:
        """Compare the checksum.

        Raises:
            CorruptedObjectError: What was read is not what was written.
        """
        if self._ending is None:
            self._read_ending()
        expected = bytes(_padding(self._offset - self._start)) + self.digest.to_bytes(
            CHECKSUM_BYTES, "little"
        )
        if self._ending != expected:
            raise CorruptedObjectError(
                f"{self._origin}: the checksum is wrong. The object was damaged, or written for another run, model or sync."
            )

    def _read_ending(self) -> None:
        ending = bytearray(self._stop - self._end)
        self._reader.read_into(self._end, memoryview(ending))
        self._ending = bytes(ending)


def section_parts(section: Section, chunks: Iterable[torch.Tensor]) -> Iterator[Buffer]:
    """The bytes of a section, chunk by chunk, then its checksum. A chunk may be reused after it was yielded.

    Args:
        section: The section.
        chunks: Its values, encoded.
    """
    digest = xxhash.xxh3_64(seed=section.seed)
    size = 0
    for chunk in chunks:
        buffer = view(chunk)
        digest.update(buffer)
        size += len(buffer)
        yield buffer
    yield bytes(_padding(size)) + digest.intdigest().to_bytes(CHECKSUM_BYTES, "little")
