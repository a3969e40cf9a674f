"""Reading the file of a contribution (:mod:`._delta`).

The owner of a shard adds contributions up and updates its own copy as it goes. Where that cannot be
undone, every chunk is verified before it is used, which takes the checksums at the end of its
section first; then a chunk that does not match is read again, so a bit that flips in transit costs
one more request. Otherwise the checksums are read with the last values.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
import xxhash

from .._codecs._codec import Codec
from .._errors import CorruptedObjectError
from .._store._api import Buffer, Closing, ObjectReader, read_bytes
from ._sections import CHECKSUM_BYTES, fill, sum_bytes, wrong_checksum

T = TypeVar("T")


class Again(Protocol):
    """Calls a function that reads something, and calls it again after errors that may pass."""

    def __call__(self, read: Callable[[], T], /) -> T: ...


def once(read: Callable[[], T]) -> T:
    """Call ``read``, and do not call it again."""
    return read()


class Place(NamedTuple):
    """The place of a section in a file.

    Its values lie from ``start`` to ``end``. From there to ``stop`` are other bytes and then
    ``sums`` checksums with the seed ``seed``.
    """

    start: int
    end: int
    stop: int
    sums: int
    seed: int
    name: str


class Chunk(NamedTuple):
    """A chunk in a file: its shard, its number and offset in the shard's section, and its codec."""

    shard: int
    number: int
    offset: int
    numel: int
    codec: Codec


@dataclass(eq=False)
class DeltaReader(Closing):
    """Reads some shards of a contribution one after another. Not thread-safe.

    Made by :meth:`.DeltaFormat.reader`.
    """

    open_file: Callable[[int], ObjectReader]
    again: Again
    origin: str
    size: int
    norms_at: Place | None
    places: Mapping[int, Place]
    chunks: Iterator[Chunk]
    verify_first: bool

    def __post_init__(self) -> None:
        self._announced = {shard: place.start for shard, place in self.places.items()}
        self._rest = torch.empty(0, device="cpu")  # of a chunk, if the caller's are smaller
        self._reader: ObjectReader | None = None
        self._sums: dict[int, bytes] = {}  # of shards, as they are in the file
        self._found: dict[int, bytearray] = {}  # of what was read, if it is verified later

    def open(self) -> None:
        """Open the file now, so that errors show before anything is read.

        Raises:
            ObjectNotFoundError: There is no such file.
            CorruptedObjectError: It does not have the size that it should have.
        """
        self.again(self._opened)

    def announce_norms(self) -> None:
        """Tell the store that the norms will be read, before anything else is announced."""
        if self.norms_at is not None:
            self._opened().expect(self.norms_at.start, self.norms_at.stop)

    def announce(self, sizes: Mapping[int, int], block_bytes: int) -> None:
        """Tell the store how many bytes of each shard will be read next.

        What lies side by side in the file becomes one request; ``block_bytes`` is the most that one
        request reads.
        """
        reader = self._opened()
        spans: list[tuple[int, int]] = []
        for shard, size in sizes.items():
            place, start = self.places[shard], self._announced[shard]
            in_one = place.stop - place.start <= block_bytes
            stop = self._announced[shard] = start + size
            if self.verify_first and in_one:
                # All at once, since its checksums, which are at its end, are read first.
                stop = self._announced[shard] = place.end
            elif self.verify_first and start == place.start:
                reader.expect(place.end, place.stop)
            if start == place.end:
                continue
            if stop == place.end and (in_one or not self.verify_first):
                stop = place.stop
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, stop))
        for start, stop in spans:
            reader.expect(start, stop)

    def norms(self) -> tuple[float, ...]:
        """The norms of the contribution's tensors.

        Raises:
            CorruptedObjectError: They are damaged, also after they were read again.
        """
        place = self.norms_at
        assert place is not None  # every contribution to a run with clipping has them

        def read(reader: ObjectReader) -> tuple[float, ...]:
            data = read_bytes(reader, place.start, place.stop)
            norms = struct.unpack(f"<{len(data) // 8 - 1}d", data[:-CHECKSUM_BYTES])
            if data[-CHECKSUM_BYTES:] != checksum(data[:-CHECKSUM_BYTES], place.seed, 0):
                raise self._wrong(place)
            if not all(0 <= norm < math.inf for norm in norms):
                raise CorruptedObjectError(
                    f"{self.origin}, section norms: a norm is not a finite number of at least 0"
                )
            return norms

        return self._attempt(read)

    def read(self, out: torch.Tensor) -> torch.Tensor:
        """Fill a contiguous CPU tensor with the next elements, and return it.

        Raises:
            CorruptedObjectError: They cannot be read, also after further attempts; where they are
                verified first, that they do not match their checksum.
        """
        filled = 0
        while filled < out.numel():
            if not self._rest.numel():
                chunk = next(self.chunks)
                if chunk.numel <= out.numel() - filled:
                    self._fill(chunk, out[filled : filled + chunk.numel])
                    filled += chunk.numel
                    continue
                self._rest = torch.empty(chunk.numel, dtype=out.dtype, device="cpu")
                self._fill(chunk, self._rest)
            count = min(self._rest.numel(), out.numel() - filled)
            out[filled : filled + count] = self._rest[:count]
            self._rest = self._rest[count:]
            filled += count
        return out

    def verify(self, shard: int) -> None:
        """Verify a shard that has been read, unless that was done before it was used.

        Raises:
            CorruptedObjectError: What was read is not what was written.
        """
        if self.verify_first or not self.places[shard].sums:
            return
        if not self._found.get(shard) or self._found[shard] != self._sums.get(shard, b""):
            raise self._wrong(self.places[shard])

    def close(self) -> None:
        """Close the file; repeatable."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _fill(self, chunk: Chunk, out: torch.Tensor) -> None:
        place = self.places[chunk.shard]

        def read(reader: ObjectReader) -> None:
            if self.verify_first and chunk.shard not in self._sums:
                self._read_sums(reader, chunk.shard)
            start = place.start + chunk.offset
            data = fill(chunk.codec, out, lambda into: reader.read_into(start, into))
            digest = checksum(data, place.seed, chunk.number)
            if not self.verify_first:
                if chunk.number == place.sums - 1:
                    # They were fetched with the last values, whose memory is needed for what is
                    # read next.
                    self._read_sums(reader, chunk.shard)
                self._found.setdefault(chunk.shard, bytearray()).extend(digest)
            elif not self._sums[chunk.shard].startswith(digest, CHECKSUM_BYTES * chunk.number):
                raise self._wrong(place)

        self._attempt(read)

    def _read_sums(self, reader: ObjectReader, shard: int) -> None:
        place = self.places[shard]
        ending = read_bytes(reader, place.end, place.stop)
        self._sums[shard] = ending[-CHECKSUM_BYTES * place.sums :]

    def _attempt(self, read: Callable[[ObjectReader], T]) -> T:
        def attempt() -> T:
            try:
                return read(self._opened())
            except BaseException:
                self.close()  # the wrong bytes may be among those that the reader has fetched ahead
                if self.verify_first:
                    self._sums.clear()
                raise

        return self.again(attempt)

    def _opened(self) -> ObjectReader:
        if self._reader is None:
            reader = self.open_file(self.size)
            if reader.size != self.size:
                reader.close()
                raise CorruptedObjectError(
                    f"{self.origin} has {reader.size} bytes, but should have {self.size}: it is "
                    "truncated or damaged"
                )
            self._reader = reader
        return self._reader

    def _wrong(self, place: Place) -> CorruptedObjectError:
        return wrong_checksum(f"{self.origin}, section {place.name}", "a checksum")


def checksum(data: Buffer, first_seed: int, number: int) -> bytes:
    """Return the checksum of the chunk with this number in a section.

    It is valid in no other place of the file.
    """
    digest = xxhash.xxh3_64_intdigest(data, seed=(first_seed + number) % 2**64)
    return sum_bytes(digest)
