"""Published shards: what a file of the checkpoint holds, how it is written and how it is read."""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from ._errors import CorruptedObjectError
from ._layout import Rule
from ._sharded import adopt_shard
from ._wire import CHECKSUM_BYTES, Section, SectionReader, header, section_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ._exchange import SyncJob
    from ._layout import Layout, Piece
    from ._sharded import Scratch
    from ._store import Buffer, ObjectReader

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 2**24


class Shard:
    """One shard of a job's state: first its values, then what the outer optimizer keeps of it.

    Args:
        job: Whose state it is.
        number: Which shard.
        seed: Makes the seed of a section from what the section is.
        chunk_bytes: Bytes handled at once.
    """

    def __init__(self, job: SyncJob, number: int, seed: Callable[..., int], chunk_bytes: int) -> None:
        self.number = number
        self._job = job
        self._layout: Layout = job.layout
        self._seed = seed
        self._chunk_bytes = chunk_bytes

    def parts(self, metadata: Mapping[str, str], written: Callable[[int], None] | None = None) -> Iterator[Buffer]:
        """The file. ``written`` gets the checksum of the values when they are through."""
        chunks = list(self._layout.chunks(self.number, self._chunk_bytes))
        outer = self._outer_chunks()
        names = sorted(self._job.outer_state(outer[0])) if outer else []
        scalars = dict(self._job.outer_scalars(outer[0])) if outer else {}
        sections = [self.values(), *(self.outer(name) for name in names)]
        yield header(self._layout, sections, {**metadata, "shard": str(self.number), "scalars": json.dumps(scalars)})
        last: Buffer = b""
        for last in section_parts(sections[0], (self._job.published(chunk) for chunk in chunks)):
            yield last
        if written is not None:
            written(int.from_bytes(last[-CHECKSUM_BYTES:], "little"))
        for section, name in zip(sections[1:], names, strict=True):
            yield from section_parts(section, (self._job.outer_state(chunk)[name] for chunk in outer))

    def digest(self) -> int:
        """Checksum of the values in memory."""
        chunks = self._layout.chunks(self.number, self._chunk_bytes)
        parts = section_parts(self.values(), (self._job.published(chunk) for chunk in chunks))
        (last,) = deque(parts, maxlen=1)
        return int.from_bytes(last[-CHECKSUM_BYTES:], "little")

    def announce(self, reader: ObjectReader, origin: str) -> None:
        """Have the values of a file fetched ahead, where the store does that.

        Raises:
            CorruptedObjectError: The file is too short for them.
        """
        self._values_of(reader, origin)

    def adopt(self, reader: ObjectReader, origin: str, scratch: Scratch) -> int:
        """Adopt the values of a file; returns their checksum.

        Raises:
            CorruptedObjectError: They are not what was written. The own values are undefined then.
        """
        values = self._values_of(reader, origin)

        def read(piece: Piece, out: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - the signature of a source
            values.read(out)
            return out

        adopt_shard(self._job, self.number, read, self._chunk_bytes, scratch)
        values.verify()
        return values.digest

    def check(self, reader: ObjectReader, origin: str, scratch: Scratch) -> int:
        """Checksum of the values of a file, verified; nothing is adopted.

        Raises:
            CorruptedObjectError: They are not what was written.
        """
        values = self._values_of(reader, origin)
        for chunk in self._layout.chunks(self.number, self._chunk_bytes):
            values.read(scratch.tensor(0, self._layout, chunk))
        values.verify()
        return values.digest

    def outer_state(
        self, reader: ObjectReader, origin: str
    ) -> tuple[dict[Piece, dict[str, torch.Tensor]], dict[str, float]]:
        """The outer optimizer's tensors, chunk by chunk, and its scalars."""
        found = read_header(reader, origin)
        names = [name.removeprefix("outer.").removesuffix(".xxh3") for name in sorted(found)]
        names = [name for name in names if f"outer.{name}.xxh3" in found]
        sections = [self.values(), *(self.outer(name) for name in names)]
        chunks: dict[Piece, dict[str, torch.Tensor]] = {piece: {} for piece in self._outer_chunks()}
        for index, name in enumerate(names, start=1):
            section = SectionReader(reader, self._layout, sections, index, origin)
            for piece, tensors in chunks.items():
                tensors[name] = torch.empty(piece.numel, dtype=self._layout.groups[piece.group].dtype, device="cpu")
                section.read(tensors[name])
            section.verify()
        return chunks, json.loads(found["__metadata__"]["scalars"])

    def values(self) -> Section:
        """The section of the values."""
        return Section("values", self._layout.shard(self.number), self._seed("values", self.number))

    def outer(self, name: str) -> Section:
        """The section of one of the outer optimizer's tensors."""
        pieces = self._layout.shard(self.number)
        outer = tuple(piece for piece in pieces if self._is_outer(piece))
        return Section(f"outer.{name}", outer, self._seed("outer", name, self.number))

    def _values_of(self, reader: ObjectReader, origin: str) -> SectionReader:
        return SectionReader(reader, self._layout, [self.values()], 0, origin)

    def _outer_chunks(self) -> list[Piece]:
        return list(filter(self._is_outer, self._layout.chunks(self.number, self._chunk_bytes)))

    def _is_outer(self, piece: Piece) -> bool:
        return self._layout.groups[piece.group].rule is Rule.OUTER


def read_header(reader: ObjectReader, origin: str) -> dict[str, Any]:
    """The header of a safetensors file.

    Raises:
        CorruptedObjectError: It has none.
    """
    length = bytearray(_LENGTH_BYTES)
    reader.read_into(0, memoryview(length))
    size = int.from_bytes(length, "little")
    if size > min(_MOST_HEADER_BYTES, reader.size - _LENGTH_BYTES):
        raise CorruptedObjectError(f"{origin} does not begin with the header of a safetensors file")
    text = bytearray(size)
    reader.read_into(_LENGTH_BYTES, memoryview(text))
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:
        raise CorruptedObjectError(f"the header of {origin} is damaged") from None
    return found
