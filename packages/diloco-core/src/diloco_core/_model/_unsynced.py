"""What belongs to a model's ``state_dict()`` and takes no part in syncs: frozen parameters, and buffers that are left alone.

It is stored once, when the run begins, so that a whole model can be taken out of the store.
"""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from .._arithmetic._layout import CHUNK_BYTES, Layout, Rule
from .._errors import ConfigurationError
from .._wire._published import END, Sums, ending
from .._wire._safetensors import SAFETENSORS_DTYPES
from .._wire._sections import (
    CHECKSUM_BYTES,
    Section,
    fingerprint,
    header,
    section_bytes,
    section_parts,
    seed,
)
from ._names import plain_name
from ._partition import NamedTensor
from ._segments import arrange, tensor_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from .._arithmetic._layout import Piece
    from .._store._api import Buffer

OBJECT_BYTES = 256 * 2**20
"""Most bytes of values in one of its objects."""

_EXTRA_STATE = "_extra_state"  # what torch calls the result of a module's get_extra_state()


class Unsynced:
    """The entries of a model's ``state_dict()`` beside the synced tensors.

    Attributes:
        tensors: Those with values of their own.
        layout: How their values are cut into objects.
        aliases: Further names of tensors, synced or not, and the first name of each.
        omitted: Entries that cannot be stored: extra state, whatever a hook computes, dtypes that safetensors does not know.

    Args:
        model: The model, wrapped or not.
        synced: Which of its tensors are synced.
    """

    def __init__(self, model: torch.nn.Module, synced: Iterable[NamedTensor]) -> None:
        self.tensors: list[NamedTensor] = []
        self.aliases: dict[str, str] = {}
        self.omitted: list[str] = []
        names = {id(named.tensor): named.name for named in synced}
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        for key, tensor in _entries(model).items():
            name = plain_name(model, key)
            if id(tensor) in names:
                if name != names[id(tensor)]:
                    self.aliases[name] = names[id(tensor)]
            elif (
                id(tensor) not in own
                or name.rpartition(".")[2] == _EXTRA_STATE
                or not _can_be_stored(tensor)
            ):
                self.omitted.append(name)
            else:
                names[id(tensor)] = name
                self.tensors.append(NamedTensor(name, tensor, Rule.FIRST))
        groups, self._segments = arrange(self.tensors)
        size = sum(named.wire_bytes for named in self.tensors)
        self.layout = Layout(groups, max(1, -(-size // OBJECT_BYTES)))
        self._copied: tuple[int, torch.Tensor] | None = None

    def publish(
        self, put: Callable[[str, Callable[[], Iterable[Buffer]]], object]
    ) -> dict[str, Any]:
        """Store the values; returns what the run's manifest has to say about them.

        Args:
            put: Writes an object, whose parts it may ask for again.
        """
        folder = f"unsynced/{secrets.token_hex(8)}"
        sums: list[str] = []
        table = {
            "folder": folder,
            "shards": self.layout.shards if self.tensors else 0,
            "sums": sums,
            **tensor_table(self.layout, self._segments),
            "aliases": self.aliases,
            "omitted": self.omitted,
        }
        for number in range(table["shards"]):
            written: list[int] = []  # the store may ask for the parts again: the last sum counts
            put(unsynced_key(folder, number), partial(self.parts, folder, number, written.append))
            sums.append(f"{written[-1]:016x}")
        return table

    def has_the_layout_of(self, table: Mapping[str, Any]) -> bool:
        """Whether the objects that a run's manifest speaks of are cut like those of this model."""
        own = {
            "shards": self.layout.shards if self.tensors else 0,
            **tensor_table(self.layout, self._segments),
        }
        return all(table.get(name) == value for name, value in own.items())

    def section(self, folder: str, number: int) -> Section:
        """The values of one of the objects."""
        return Section("values", self.layout.shard(number), unsynced_seed(folder, number))

    def header(self, number: int) -> bytes:
        """How one of the objects begins; the same in all folders."""
        sections = [self.section("", number), *END]
        return header(self.layout, sections, {"diloco": "unsynced", "shard": str(number)})

    def header_checksum(self, number: int) -> int:
        """What an object says at its end about its header."""
        return xxhash.xxh3_64_intdigest(self.header(number))

    def object_bytes(self, number: int) -> int:
        """Size of one of the objects."""
        return (
            len(self.header(number))
            + section_bytes(self.layout, self.section("", number))
            + CHECKSUM_BYTES * len(END)
        )

    def checksum(self, folder: str, number: int) -> int:
        """Of the values that an object would have if it were written now."""
        *_, last = section_parts(
            self.section(folder, number), map(self._chunk, self._chunks(number))
        )
        self._copied = None
        return int.from_bytes(last[-CHECKSUM_BYTES:], "little")

    def read_over(self, number: int, read: Callable[[torch.Tensor], None]) -> None:
        """Have ``read`` fill a buffer with the values of an object, chunk by chunk, and forget them."""
        for piece in self._chunks(number):
            read(
                torch.empty(piece.numel, dtype=self.layout.groups[piece.group].dtype, device="cpu")
            )

    def parts(
        self, folder: str, number: int, written: Callable[[int], object] = bool
    ) -> Iterator[Buffer]:
        """One of the objects. ``written`` gets the checksum of its values when all of it is through."""
        beginning = self.header(number)
        yield beginning
        last: Buffer = b""
        for last in section_parts(
            self.section(folder, number), map(self._chunk, self._chunks(number))
        ):
            yield last
        self._copied = None
        sums = Sums(int.from_bytes(last[-CHECKSUM_BYTES:], "little"), self.header_checksum(number))
        yield ending(sums)
        written(sums.values)

    def _chunks(self, number: int) -> Iterator[Piece]:
        return self.layout.chunks(number, CHUNK_BYTES)

    def _chunk(self, piece: Piece) -> torch.Tensor:
        out = torch.empty(piece.numel, dtype=self.layout.groups[piece.group].dtype, device="cpu")
        for segment in self._segments[piece.group]:
            start, stop = max(piece.start, segment.start), min(piece.stop, segment.stop)
            if start < stop:
                values = self._flat(segment.named.tensor)
                out[start - piece.start : stop - piece.start].copy_(
                    values[start - segment.start : stop - segment.start]
                )
        return out

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as a flat one; one that is not contiguous is copied, and kept until the next one comes."""
        if tensor.is_contiguous():
            return tensor.detach().view(-1)
        if self._copied is None or self._copied[0] != id(tensor):
            self._copied = None
            self._copied = id(tensor), tensor.detach().reshape(-1)
        return self._copied[1]


def _entries(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    try:
        return dict(model.state_dict(keep_vars=True))
    except Exception as error:
        raise ConfigurationError(
            f"model.state_dict(keep_vars=True), which lists the entries of the whole model, fails: {type(error).__name__}: "
            f"{error}. A state_dict() of your own must accept the same arguments as torch's, and return a dict."
        ) from error


def unsynced_key(folder: str, number: int) -> str:
    """Key of one of the objects."""
    return f"{folder}/{number:05}.safetensors"


def unsynced_seed(folder: str, number: int) -> int:
    """Seed of its checksum."""
    return seed(fingerprint("unsynced"), folder, number)


def _can_be_stored(tensor: torch.Tensor) -> bool:
    plain = (
        type(tensor.detach()) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_meta
    )
    return plain and tensor.dtype in SAFETENSORS_DTYPES
