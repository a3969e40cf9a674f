"""The two kinds of payload objects: deltas and state shards.

Both are valid safetensors files with checksums.

A file is a sequence of *sections*. A section consists of one tensor per piece, zeros up to a
multiple of eight bytes, and eight bytes with the xxh3-64 of the bytes of the pieces (little
endian). The checksum comes after its data, so that a writer needs only one pass, and a single
ranged read fetches both. Its seed is made from the run's schema, the sync, the writer and the
shard, so a valid section in the wrong place fails, too. In contributions, every chunk has one.

The position of a section, in published shards counted from the end of the file, follows from the
layout alone, so readers do not depend on the header. The header is for people and other tools, and
for what :mod:`._published` puts into it.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

import torch
import xxhash

from .._arithmetic._layout import Layout, Piece
from .._codecs._codec import Codec
from .._codecs._plain import PLAIN
from .._errors import CorruptedObjectError
from .._store._api import Buffer, ObjectReader, read_bytes
from ._safetensors import LENGTH_BYTES, entry, header_bytes

T = TypeVar("T")
Parts: TypeAlias = Generator[Buffer, None, int]
"""Bytes of a file, one buffer after the other, and at their end a checksum, which is returned."""
CHECKSUM_BYTES = 8
NUMBER_BYTES = 8
# Sections begin at multiples of this many bytes, so that other tools can map each tensor of a file,
# whatever its dtype.
_ALIGNMENT = 8
# The dtypes of most tensors. Others need another tensor first, which takes as long as the rest.
_OF_NUMPY = {torch.float32, torch.float64, torch.uint8}


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a file with a checksum of its own.

    Attributes:
        name: The first part of the names of its tensors: ``<name>.<group>`` and ``<name>.xxh3``.
        pieces: The pieces that it holds, in file order.
        seed: Seed of its checksum.
        sums: The number of checksums at its end, of eight bytes each.
        codec: How its values are encoded.
        numbers: The number of float64 numbers before its pieces, little endian; its checksums cover
            them too.
    """

    name: str
    pieces: tuple[Piece, ...]
    seed: int
    sums: int = 1
    codec: Codec = PLAIN
    numbers: int = 0

    def values_bytes(self, layout: Layout) -> int:
        """Size of its encoded pieces in bytes, without padding and checksums."""
        return sum(layout.sent_bytes(piece, self.codec) for piece in self.pieces)


def fingerprint(*identity: object) -> str:
    """A digest of anything that JSON can express: 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(json.dumps(identity).encode())


def seed(*identity: object) -> int:
    """Return the seed of a checksum, made from what identifies a section.

    That is anything that JSON can express.
    """
    return xxhash.xxh3_64_intdigest(json.dumps(identity).encode())


def view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor as a writable view, without a copy."""
    if not tensor.numel():
        return memoryview(bytearray())
    flat = tensor if tensor.dim() == 1 else tensor.reshape(-1)
    # Typed as Any, since numpy declares the buffer protocol only from Python 3.12 on.
    if flat.dtype in _OF_NUMPY:
        array: Any = flat.numpy()
        return memoryview(array).cast("B")
    array = flat.view(torch.uint8).numpy()  # numpy does not know all dtypes
    return memoryview(array)


def section_starts(layout: Layout, sections: Iterable[Section]) -> list[int]:
    """Return the byte offset of each section in the data of a file, followed by the data's size."""
    starts = [0]
    for section in sections:
        starts.append(starts[-1] + section_bytes(layout, section))
    return starts


def padding_bytes(size: int) -> int:
    """The number of zeros that follow so many bytes of pieces."""
    return -size % _ALIGNMENT


def header(
    layout: Layout, sections: Sequence[Section], metadata: Mapping[str, str], least: int = 0
) -> bytes:
    """Return a file's safetensors header, with its length: at least ``least`` bytes."""
    tensors: dict[str, object] = {}
    for section, start in zip(sections, section_starts(layout, sections), strict=False):
        offset = start + NUMBER_BYTES * section.numbers
        if section.numbers:
            tensors[section.name] = entry(torch.float64, [section.numbers], start, offset)
        for piece in section.pieces:
            end = offset + layout.sent_bytes(piece, section.codec)
            plain = layout.codec_of(piece.group, section.codec).plain
            dtype = layout.groups[piece.group].dtype if plain else torch.uint8
            shape = [piece.numel if plain else end - offset]
            tensors[f"{section.name}.{piece.group}"] = entry(dtype, shape, offset, end)
            offset = end
        end = offset + padding_bytes(offset - start) + CHECKSUM_BYTES * section.sums
        if end > offset:
            tensors[f"{section.name}.xxh3"] = entry(torch.uint8, [end - offset], offset, end)
    return header_bytes(tensors, metadata, least)


def section_bytes(layout: Layout, section: Section) -> int:
    """Size of a section in bytes, including padding and checksums."""
    size = section.values_bytes(layout) + NUMBER_BYTES * section.numbers
    return size + padding_bytes(size) + CHECKSUM_BYTES * section.sums


def fill(codec: Codec, out: torch.Tensor, read_into: Callable[[memoryview], None]) -> memoryview:
    """Read the bytes of a chunk, and fill a contiguous CPU tensor with its values.

    Returns the bytes.

    Args:
        codec: How they are encoded.
        out: The tensor to fill.
        read_into: Fills a buffer with the bytes of the chunk.
    """
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
        layout: How the tensors of the sync are cut into shards.
        section: The section.
        start: The offset in the file at which it begins, in bytes.
        origin: What the file is called in errors.

    Raises:
        CorruptedObjectError: The file is too short for the section.
    """

    def __init__(
        self, reader: ObjectReader, layout: Layout, section: Section, start: int, origin: str
    ) -> None:
        if start < LENGTH_BYTES:
            raise CorruptedObjectError(
                f"{origin} has only {reader.size} bytes: it is truncated, or it was written for "
                "another model"
            )
        self._reader = reader
        self._start = self._offset = start
        sizes = [layout.sent_bytes(piece, section.codec) for piece in section.pieces]
        self._codecs = [layout.codec_of(piece.group, section.codec) for piece in section.pieces]
        self._ends = list(accumulate(sizes, initial=start))[1:]  # of the pieces
        self._end = start + sum(sizes)
        self._stop = start + section_bytes(layout, section)
        self._hash = xxhash.xxh3_64(seed=section.seed)
        self._ending: bytes | None = None
        self._origin = f"{origin}, section {section.name}"

    def read(self, out: torch.Tensor) -> None:
        """Fill a contiguous CPU tensor with the next elements.

        They must not be trusted before :meth:`verify`.
        """
        fill(self._codecs[bisect_right(self._ends, self._offset)], out, self.read_encoded)

    def read_encoded(self, buffer: memoryview) -> None:
        """Fill a buffer with the next bytes as they are in the file; as :meth:`read`."""
        self._reader.read_into(self._offset, buffer)
        self._hash.update(buffer)
        self._offset += len(buffer)
        if self._offset == self._end:
            # It was fetched with the last piece, whose memory is needed for what is read next
            self._read_ending()

    @property
    def digest(self) -> int:
        """The checksum of all bytes that were read so far."""
        return self._hash.intdigest()

    @property
    def padding(self) -> int:
        """The number of zeros that follow the bytes that were read so far, if those are all."""
        return padding_bytes(self._offset - self._start)

    def verify(self) -> None:
        """Verify the checksum of the section.

        Raises:
            CorruptedObjectError: The section is damaged.
        """
        if self._ending is None:
            self._read_ending()
        if self._ending != bytes(self.padding) + sum_bytes(self.digest):
            raise wrong_checksum(self._origin)

    def _read_ending(self) -> None:
        self._ending = read_bytes(self._reader, self._end, self._stop)


def section_parts(section: Section, chunks: Iterable[torch.Tensor]) -> Parts:
    """The bytes of a section, chunk by chunk, and then its checksum.

    The buffer of a chunk may be reused for the next one.

    Args:
        section: The section.
        chunks: Its encoded values.

    Returns:
        The checksum.
    """
    digest = xxhash.xxh3_64(seed=section.seed)
    size = 0
    for chunk in chunks:
        buffer = view(chunk)
        digest.update(buffer)
        size += len(buffer)
        yield buffer
    yield bytes(padding_bytes(size)) + sum_bytes(digest.intdigest())
    return digest.intdigest()


def result_of(parts: Generator[object, None, T]) -> T:
    """Go through the parts of a file for what comes at their end, and write them nowhere."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: T = end.value
            return result


def wrong_checksum(origin: str, which: str = "the checksum") -> CorruptedObjectError:
    """The error for bytes of which ``which`` checksum does not fit them."""
    return CorruptedObjectError(
        f"{origin}: {which} is wrong. The object is damaged, or it was written for another run, "
        "model or sync."
    )


def sum_bytes(checksum: int) -> bytes:
    """A checksum as it is in files."""
    return checksum.to_bytes(CHECKSUM_BYTES, "little")
