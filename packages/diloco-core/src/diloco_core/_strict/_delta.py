"""The contributions of a strict run. Every chunk is verified before it is used.

The owner of a shard adds contributions up chunk by chunk and updates its own copy at once, which nobody could take back. So
a section of these files ends with a checksum for every chunk: that of all bytes of the section up to the chunk's end. What
does not match is read again, and a flipped bit on the way costs a second request instead of the run.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Self

import xxhash

from .._arithmetic._sharded import sent_pieces
from .._codecs._plain import PLAIN
from .._errors import CorruptedObjectError
from .._store._api import ReadsAhead, block_bytes_of
from .._store._reread import read_again
from .._wire._sections import CHECKSUM_BYTES, Section, ValuesDecoder, header, section_bytes, view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import TracebackType

    import torch

    from .._arithmetic._layout import Layout
    from .._codecs._codec import Codec
    from .._store._api import Buffer, ObjectReader
    from .._store._patient import Patient
    from .._timing import Timing


class DeltaPlan:
    """What contributions look like that carry the same groups. They differ in the shards that a rank does not send.

    Args:
        layout: The plan of the sync.
        world_size: Number of ranks; a rank does not send the shards that it updates itself.
        chunk_bytes: Bytes handled at once.
        carried: The groups, as bits.
        first: Whether it is rank 0's, which alone sends what only the first one's values are taken of.
        codec: How they are encoded.
    """

    def __init__(
        self,
        layout: Layout,
        world_size: int,
        chunk_bytes: int,
        carried: int,
        *,
        first: bool,
        codec: Codec = PLAIN,
    ) -> None:
        self.layout = layout
        self._world_size = world_size
        self._sections: list[Section] = []
        for shard in range(layout.shards):
            pieces = sent_pieces(layout, shard, 0 if first else 1, carried)
            groups = {piece.group for piece in pieces}
            chunks = sum(chunk.group in groups for chunk in layout.chunks(shard, chunk_bytes))
            self._sections.append(Section(f"shard.{shard}", pieces, 0, max(chunks, 1), codec))
        self._sizes = [section_bytes(layout, section) for section in self._sections]
        self._after = list(accumulate(reversed(self._sizes), initial=0))[::-1]

    def shards(self, rank: int) -> list[int]:
        """The shards that a rank sends, in file order."""
        return [shard for shard in range(self.layout.shards) if shard % self._world_size != rank]

    def section(self, shard: int, seed: int) -> Section:
        """The section of a shard."""
        return replace(self._sections[shard], seed=seed)

    def distance(self, rank: int, shard: int) -> int:
        """How many bytes before the end of a rank's file the section of a shard begins."""
        first = shard + (rank - shard) % self._world_size
        return self._after[shard] - sum(self._sizes[first :: self._world_size])


class DeltaFile:
    """The contribution of one rank.

    Args:
        plan: What it looks like.
        rank: The contributor.
        seed: Makes the seed of a shard's section.
        metadata: For people and other tools.
    """

    def __init__(
        self, plan: DeltaPlan, rank: int, seed: Callable[[int], int], metadata: Mapping[str, str]
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
        """How many bytes before the end of the file the section of a shard begins."""
        return self._plan.distance(self._rank, shard)

    def parts(self, contributions: Callable[[int], Iterable[torch.Tensor]]) -> Iterator[Buffer]:
        """The bytes of the file; ``contributions`` gives the chunks of a shard, encoded."""
        shards = self._plan.shards(self._rank)
        sections = [self.section(shard) for shard in shards]
        yield header(self.layout, sections, self._metadata)
        for section, shard in zip(sections, shards, strict=True):
            digest = xxhash.xxh3_64(seed=section.seed)
            sums = []
            left = section_bytes(self.layout, section)
            for chunk in contributions(shard):
                buffer = view(chunk)
                digest.update(buffer)
                sums.append(digest.intdigest())
                left -= len(buffer)
                yield buffer
            table = b"".join(
                value.to_bytes(CHECKSUM_BYTES, "little") for value in sums or [digest.intdigest()]
            )
            yield bytes(left - len(table)) + table


class ShardDelta:
    """A rank's contribution to one shard, read chunk by chunk; what is handed out is verified. Not thread-safe.

    Args:
        store: Where the file is.
        key: Its key.
        size: Its size in bytes.
        file: What it looks like.
        shard: Which shard.
        timing: Its ``sleep`` is used before something is read again.

    Raises:
        CorruptedObjectError: The file has not the size that it should have.
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
        # Counted from the end: the header is for people and other tools.
        self._offset = self._announced = size - file.distance(shard)
        self._values = ValuesDecoder(file.layout, section)
        self._start, self._end = self._offset, self._offset + self._values.size
        self._stop = self._offset + section_bytes(file.layout, section)
        if self._offset < 0:
            raise CorruptedObjectError(
                f"{self._origin}: the object has {size} bytes: it is truncated."
            )
        self._table = b""
        self._hash = xxhash.xxh3_64(seed=section.seed)
        self._sums = section.sums
        self._chunks = 0
        self._block_bytes = block_bytes_of(store.store)
        self._reader: ObjectReader | None = None
        self._expect: Callable[[int, int], None] | None = None

    def announce(self, size: int) -> None:
        """So many bytes will be read next, where the store profits from knowing that."""
        self._opened()
        if self._expect is None:
            return
        start, stop = self._announced, self._announced + size
        if start == self._offset and not self._table:
            if self._stop - start <= self._block_bytes:
                stop = self._stop  # all of it with one request, the checksums included
            else:
                self._expect(self._end, self._stop)
        self._announced = stop
        self._expect(start, stop)

    def read(self, out: torch.Tensor) -> None:
        """Fill a contiguous CPU tensor with the next chunk, verified.

        Raises:
            CorruptedObjectError: It is not what was written, however often it is read.
        """
        read_again(self._timing, lambda: self._store.attempt(lambda: self._read(out)))
        self._chunks += 1

    def close(self) -> None:
        """Let go of the reader; repeatable."""
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
                    f"{self._origin}: a checksum is wrong. The object was damaged, or written for another run, model or sync."
                )
        except BaseException:
            self.close()  # what it has fetched ahead may be what is wrong
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
            self._expect = (
                reader.expect if isinstance(reader, ReadsAhead) else None
            )  # asked once: that is slow
        return self._reader

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
