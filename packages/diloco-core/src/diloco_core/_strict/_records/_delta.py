"""The contributions of a strict run. Every chunk is verified before it is used.

The owner of a shard adds up the contributions chunk by chunk and updates its own copy as it goes, which cannot be undone. So
each section of these files ends with one checksum per chunk, taken over all bytes of the section up to the end of that chunk.
A chunk that does not match is read again, so a bit that flips in transit costs a second request instead of the run.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import xxhash

from ..._arithmetic._sharded import sent_pieces
from ..._codecs._plain import PLAIN
from ..._errors import CorruptedObjectError
from ..._store._api import ReadsAhead, block_bytes_of
from ..._store._closing import Closing
from ..._store._reread import read_again
from ..._wire._norms import announce_norms, norms_part, norms_section, read_norms
from ..._wire._sections import CHECKSUM_BYTES, Section, ValuesDecoder, header, section_bytes, view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import ExitStack

    import torch

    from ..._arithmetic._layout import Layout
    from ..._codecs._codec import Codec
    from ..._store._api import Buffer, ObjectReader
    from ..._store._patient import Patient
    from ..._timing import Timing


class DeltaPlan:
    """The format of all contributions that carry the same groups of tensors. They differ only in which shards a rank sends.

    Args:
        layout: How the tensors of the sync are cut into shards.
        world_size: Number of ranks; a rank does not send the shards that it updates itself.
        chunk_bytes: Number of bytes handled at once.
        carried: The groups that are sent, one bit for each.
        is_rank_zero: Whether rank 0 is the sender. It alone sends the groups whose values all replicas take from it.
        codec: How the values are encoded.
        norms: The number of norms that precede the shards; None if contributions are not clipped.
    """

    def __init__(
        self,
        layout: Layout,
        world_size: int,
        chunk_bytes: int,
        carried: int,
        *,
        is_rank_zero: bool,
        codec: Codec = PLAIN,
        norms: int | None = None,
    ) -> None:
        self.layout = layout
        self.norms = None if norms is None else norms_section(norms, 0)
        self._world_size = world_size
        self._sections: list[Section] = []
        for shard in range(layout.shards):
            pieces = sent_pieces(layout, shard, 0 if is_rank_zero else 1, carried)
            chunks = sum(layout.chunk_count(piece, chunk_bytes) for piece in pieces)
            self._sections.append(Section(f"shard.{shard}", pieces, 0, max(chunks, 1), codec))
        self._sizes = [section_bytes(layout, section) for section in self._sections]
        # Bytes from the beginning of each section to the end of a file with all sections.
        self._bytes_to_end = list(accumulate(reversed(self._sizes), initial=0))[::-1]

    def shards(self, rank: int) -> list[int]:
        """The shards that a rank sends, in file order."""
        return [shard for shard in range(self.layout.shards) if shard % self._world_size != rank]

    def section(self, shard: int, seed: int) -> Section:
        """The section of a shard."""
        return replace(self._sections[shard], seed=seed)

    def distance_of_norms(self, rank: int) -> int:
        """Number of bytes between the beginning of the norms and the end of a rank's file."""
        norms = 0 if self.norms is None else section_bytes(self.layout, self.norms)
        return norms + sum(self._sizes[shard] for shard in self.shards(rank))

    def distance(self, rank: int, shard: int) -> int:
        """Number of bytes between the beginning of a shard's section and the end of a rank's file."""
        next_unsent = shard + (rank - shard) % self._world_size
        return self._bytes_to_end[shard] - sum(self._sizes[next_unsent :: self._world_size])


class DeltaFile:
    """The format of one rank's contribution.

    Args:
        plan: The format that it has in common with those of other ranks.
        rank: The contributor.
        seed: Returns the seed of the checksums of a shard's section, or of that of the norms (``"norms"``).
        metadata: Goes into the header, for people and other tools.
    """

    def __init__(
        self,
        plan: DeltaPlan,
        rank: int,
        seed: Callable[[int | str], int],
        metadata: Mapping[str, str],
    ) -> None:
        self.layout = plan.layout
        self._plan = plan
        self._rank = rank
        self._seed = seed
        self._metadata = metadata

    def section(self, shard: int) -> Section:
        """The section of a shard."""
        return self._plan.section(shard, self._seed(shard))

    def distance(self, shard: int) -> int:
        """Number of bytes between the beginning of a shard's section and the end of the file."""
        return self._plan.distance(self._rank, shard)

    @property
    def norms_section(self) -> Section | None:
        """The section of the norms; None if contributions are not clipped."""
        norms = self._plan.norms
        return norms and replace(norms, seed=self._seed("norms"))

    def norms(
        self, store: Patient, key: str, size: int, timing: Timing, opened: ExitStack
    ) -> Callable[[], tuple[float, ...]]:
        """Announce the norms in a file of this format. Returns a function that reads them.

        It raises a CorruptedObjectError if they are damaged, also after they were read again.

        Args:
            store: Where the file is.
            key: Its key.
            size: Its size in bytes.
            timing: Its ``sleep`` is used before they are read again.
            opened: Closes what was opened, if the norms are not read.
        """
        section = self.norms_section
        assert section is not None  # every contribution has norms, or none has
        start, origin = size - self._plan.distance_of_norms(self._rank), f"{store.uri}/{key}"

        def ahead() -> ObjectReader:
            reader = store.store.open(key, size)
            announce_norms(reader, section, start)
            return reader

        first = None if store.near else opened.enter_context(ahead())

        def read() -> tuple[float, ...]:
            nonlocal first
            reader, first = first or ahead(), None
            with reader:
                return read_norms(reader, section, start, origin)

        return lambda: read_again(timing, lambda: store.attempt(read))

    def parts(
        self,
        contributions: Callable[[int], Iterable[torch.Tensor]],
        norms: Sequence[float] = (),
    ) -> Iterator[Buffer]:
        """The bytes of the file; ``contributions`` yields the encoded chunks of a shard."""
        shards = self._plan.shards(self._rank)
        sections = [self.section(shard) for shard in shards]
        norms_section = self.norms_section
        yield header(self.layout, [*filter(None, [norms_section]), *sections], self._metadata)
        if norms_section is not None:
            yield norms_part(norms_section, norms)
        for section, shard in zip(sections, shards, strict=True):
            digest = xxhash.xxh3_64(seed=section.seed)
            sums = []
            bytes_left = section_bytes(self.layout, section)
            for chunk in contributions(shard):
                buffer = view(chunk)
                digest.update(buffer)
                sums.append(digest.intdigest())
                bytes_left -= len(buffer)
                yield buffer
            table = b"".join(
                value.to_bytes(CHECKSUM_BYTES, "little") for value in sums or [digest.intdigest()]
            )
            yield bytes(bytes_left - len(table)) + table


class ShardDelta(Closing):
    """Reads one rank's contribution to one shard chunk by chunk, and verifies each before it is used. Not thread-safe.

    Args:
        store: Where the file is.
        key: The key of the file.
        size: The size of the file in bytes.
        file: The format of the file.
        shard: The shard to read.
        timing: Its ``sleep`` is used before a chunk is read again.

    Raises:
        CorruptedObjectError: The file is too short.
    """

    def __init__(
        self, store: Patient, key: str, size: int, file: DeltaFile, shard: int, timing: Timing
    ) -> None:
        section = file.section(shard)
        self._store = store
        self._key = key
        self._size = size
        self._timing = timing
        self._origin = f"{store.uri}/{key}, section {section.name}"
        # Counted from the end of the file, since the header, which is for people and other tools, may have any length.
        self._offset = self._announced = size - file.distance(shard)
        self._values = ValuesDecoder(file.layout, section)
        self._start, self._end = self._offset, self._offset + self._values.size
        self._stop = self._offset + section_bytes(file.layout, section)
        if self._offset < 0:
            raise CorruptedObjectError(
                f"{self._origin}: the object is truncated: it has {size} bytes, and {file.distance(shard)} are needed."
            )
        self._table = b""
        self._hash = xxhash.xxh3_64(seed=section.seed)
        self._sums = section.sums
        self._chunks = 0
        self._block_bytes = block_bytes_of(store.store)
        self._reader: ObjectReader | None = None
        self._expect: Callable[[int, int], None] | None = None

    def announce(self, size: int) -> None:
        """Tell the store that so many bytes will be read next, if it can fetch them ahead."""
        self._opened()
        if self._expect is None:
            return
        start, stop = self._announced, self._announced + size
        if start == self._offset and not self._table:
            if self._stop - start <= self._block_bytes:
                stop = self._stop  # the whole section in one request, including the checksums
            else:
                self._expect(self._end, self._stop)
        self._announced = stop
        self._expect(start, stop)

    def read(self, out: torch.Tensor) -> None:
        """Fill a contiguous CPU tensor with the next chunk and verify it.

        Raises:
            CorruptedObjectError: The chunk does not match its checksum, also after it was read again.
        """
        read_again(self._timing, lambda: self._store.attempt(lambda: self._read(out)))
        self._chunks += 1

    def close(self) -> None:
        """Close the reader; repeatable."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _read(self, out: torch.Tensor) -> None:
        try:
            reader = self._opened()
            if not self._table:
                self._table = self._read_table(reader)
            buffer = self._values.fill(
                self._offset - self._start, out, lambda into: reader.read_into(self._offset, into)
            )
            digest = self._hash.copy()
            digest.update(buffer)
            start = self._chunks * CHECKSUM_BYTES
            if digest.intdigest() != int.from_bytes(
                self._table[start : start + CHECKSUM_BYTES], "little"
            ):
                raise CorruptedObjectError(
                    f"{self._origin}: a checksum is wrong. The object is damaged, or it was written for another run, model or "
                    "sync."
                )
        except BaseException:
            self.close()  # the wrong bytes may be among those that the reader has fetched ahead
            self._table = b""
            raise
        self._hash = digest
        self._offset += len(buffer)

    def _read_table(self, reader: ObjectReader) -> bytes:
        ending = bytearray(self._stop - self._end)
        reader.read_into(self._end, memoryview(ending))
        return bytes(ending[-CHECKSUM_BYTES * self._sums :])

    def _opened(self) -> ObjectReader:
        if self._reader is None:
            self._reader = reader = self._store.store.open(self._key, self._size)
            # Checked once per reader, since isinstance() with a protocol is slow.
            self._expect = reader.expect if isinstance(reader, ReadsAhead) else None
        return self._reader
