"""The contributions of a strict run. Every chunk is verified before it is used.

The owner of a shard adds contributions up chunk by chunk and updates its own copy at once, which nobody could take back. So
a section of these files ends with a checksum for every chunk: that of all bytes of the section up to the chunk's end. What
does not match is read again, and a flipped bit on the way costs a second request instead of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import xxhash

from ._errors import CorruptedObjectError
from ._reread import read_again
from ._sharded import sent_pieces
from ._store import ReadsAhead
from ._wire import CHECKSUM_BYTES, Section, header, section_starts, view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import TracebackType

    import torch

    from ._layout import Layout
    from ._patient import Patient
    from ._store import Buffer, ObjectReader
    from ._timing import Timing


@dataclass(frozen=True, slots=True)
class DeltaFile:
    """What the contribution of a rank looks like: the same for its writer and its readers.

    Attributes:
        layout: The plan of the sync.
        rank: The contributor.
        shards: The shards that it sends, in file order: those that it does not update itself.
        sections: One for every shard.
        metadata: For people and other tools.
    """

    layout: Layout
    rank: int
    shards: tuple[int, ...]
    sections: tuple[Section, ...]
    metadata: Mapping[str, str]

    @classmethod
    def plan(
        cls,
        layout: Layout,
        rank: int,
        world_size: int,
        chunk_bytes: int,
        carried: int,
        seed: Callable[[int], int],
        metadata: Mapping[str, str],
    ) -> Self:
        """The file of a rank that carries certain groups; ``seed`` makes the seed of a shard's section."""
        shards = tuple(shard for shard in range(layout.shards) if shard % world_size != rank)
        sections = []
        for shard in shards:
            pieces = sent_pieces(layout, shard, rank, carried)
            groups = {piece.group for piece in pieces}
            chunks = sum(chunk.group in groups for chunk in layout.chunks(shard, chunk_bytes))
            sections.append(Section(f"shard.{shard}", pieces, seed(shard), max(chunks, 1)))
        return cls(layout, rank, shards, tuple(sections), metadata)

    def parts(self, contributions: Callable[[int], Iterable[torch.Tensor]]) -> Iterator[Buffer]:
        """The bytes of the file; ``contributions`` gives the chunks of a shard."""
        yield self.header()
        starts = section_starts(self.layout, self.sections)
        for index, (section, shard) in enumerate(zip(self.sections, self.shards, strict=True)):
            digest = xxhash.xxh3_64(seed=section.seed)
            sums = []
            left = starts[index + 1] - starts[index]
            for chunk in contributions(shard):
                buffer = view(chunk)
                digest.update(buffer)
                sums.append(digest.intdigest())
                left -= len(buffer)
                yield buffer
            table = b"".join(value.to_bytes(CHECKSUM_BYTES, "little") for value in sums or [digest.intdigest()])
            yield bytes(left - len(table)) + table

    def header(self) -> bytes:
        """The header of the file. Readers need not read it, since they can make it."""
        return header(self.layout, self.sections, self.metadata)


class ShardDelta:
    """A rank's contribution to one shard, read chunk by chunk; what is handed out is verified. Not thread-safe.

    Args:
        store: Where the file is.
        key: Its key.
        file: What it looks like.
        shard: Which shard.
        timing: Its ``sleep`` is used before something is read again.
    """

    def __init__(self, store: Patient, key: str, file: DeltaFile, shard: int, timing: Timing) -> None:
        index = file.shards.index(shard)
        starts = section_starts(file.layout, file.sections)
        data = len(file.header())
        self._store = store
        self._key = key
        self._timing = timing
        self._origin = f"{store.uri}/{key}, section {file.sections[index].name}"
        self._least_bytes = data + starts[-1]
        self._offset = data + starts[index]
        self._table = data + starts[index + 1] - CHECKSUM_BYTES * file.sections[index].sums
        self._sums: list[int] = [0] * file.sections[index].sums
        self._hash = xxhash.xxh3_64(seed=file.sections[index].seed)
        self._chunks = 0
        self._reader: ObjectReader | None = None

    def attach(self, reader: ObjectReader) -> None:
        """Use an open reader, which is closed here in the end; its checksums are read, and the rest is fetched ahead.

        Raises:
            CorruptedObjectError: The file is too short.
        """
        if reader.size < self._least_bytes:
            raise CorruptedObjectError(
                f"{self._origin}: the object has {reader.size} bytes, and should have {self._least_bytes}: it is truncated."
            )
        table = bytearray(CHECKSUM_BYTES * len(self._sums))
        reader.read_into(self._table, memoryview(table))
        if isinstance(reader, ReadsAhead):
            reader.expect(self._offset, self._table)
        self._sums = [
            int.from_bytes(table[start : start + CHECKSUM_BYTES], "little")
            for start in range(0, len(table), CHECKSUM_BYTES)
        ]
        self._reader = reader

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
            if self._reader is None:
                self._open()
            assert self._reader is not None
            buffer = view(out)
            self._reader.read_into(self._offset, buffer)
            digest = self._hash.copy()
            digest.update(buffer)
            if digest.intdigest() != self._sums[self._chunks]:
                raise CorruptedObjectError(
                    f"{self._origin}: a checksum is wrong. The object was damaged, or written for another run, model or sync."
                )
        except BaseException:
            self.close()  # what it has fetched ahead may be what is wrong
            raise
        self._hash = digest
        self._offset += len(buffer)

    def _open(self) -> None:
        reader = self._store.store.open(self._key)
        try:
            self.attach(reader)
        except BaseException:
            reader.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
