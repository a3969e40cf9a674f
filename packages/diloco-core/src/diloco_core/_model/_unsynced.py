"""The tensors of a model's ``state_dict()`` that are not synced: frozen parameters, and buffers under ``buffers="none"``.

They are stored once, when the run begins, so that the store holds the whole model.
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
"""The most bytes of values in one object."""

_EXTRA_STATE = (
    "_extra_state"  # the name that torch gives to the result of a module's get_extra_state()
)


class Unsynced:
    """The entries of a model's ``state_dict()`` that are not synced tensors.

    Attributes:
        tensors: The tensors that are not synced, each under its first name.
        layout: How their values are cut into objects.
        aliases: Further names of tensors, synced or not, with the first name of each.
        omitted: Names of entries that cannot be stored: extra state, and values that a hook computes.
        special: Tensors of the model that cannot be stored, with what they are: quantised ones, for instance.

    Args:
        model: The model, wrapped or not.
        synced: The tensors of the model that are synced.
    """

    def __init__(self, model: torch.nn.Module, synced: Iterable[NamedTensor]) -> None:
        self.tensors: list[NamedTensor] = []
        self.aliases: dict[str, str] = {}
        self.omitted: list[str] = []
        self.special: dict[str, str] = {}
        names = {id(named.tensor): named.name for named in synced}
        model_tensors = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        for key, tensor in _entries(model).items():
            name = plain_name(model, key)
            if id(tensor) in names:
                if name != names[id(tensor)]:
                    self.aliases[name] = names[id(tensor)]
            elif id(tensor) not in model_tensors or name.rpartition(".")[2] == _EXTRA_STATE:
                self.omitted.append(name)
            elif not _can_be_stored(tensor):
                self.special[name] = f"{type(tensor.detach()).__name__}, {tensor.dtype}"
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
        """Store the values. Returns the table that describes them in the run's manifest.

        Args:
            put: Given a key and a function that returns the parts, writes an object; it may call the function again.
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
            **({"special": self.special} if self.special else {}),
        }
        for number in range(table["shards"]):
            checksums: list[int] = []  # the parts may be asked for again: the last checksum counts
            put(unsynced_key(folder, number), partial(self.parts, folder, number, checksums.append))
            sums.append(f"{checksums[-1]:016x}")
        return table

    def has_the_layout_of(self, table: Mapping[str, Any]) -> bool:
        """Whether the objects that a run's manifest describes have the same layout as those of this model."""
        own_table = {
            "shards": self.layout.shards if self.tensors else 0,
            **tensor_table(self.layout, self._segments),
        }
        return all(table.get(name) == value for name, value in own_table.items())

    def section(self, folder: str, number: int) -> Section:
        """The section with the values of an object."""
        return Section("values", self.layout.shard(number), unsynced_seed(folder, number))

    def header(self, number: int) -> bytes:
        """The header of an object; it is the same in all folders."""
        sections = [self.section("", number), *END]
        return header(self.layout, sections, {"diloco": "unsynced", "shard": str(number)})

    def header_checksum(self, number: int) -> int:
        """The checksum of an object's header, which is stored at the end of the object."""
        return xxhash.xxh3_64_intdigest(self.header(number))

    def object_bytes(self, number: int) -> int:
        """Size of an object in bytes."""
        return (
            len(self.header(number))
            + section_bytes(self.layout, self.section("", number))
            + CHECKSUM_BYTES * len(END)
        )

    def checksum(self, folder: str, number: int) -> int:
        """The checksum of the values that an object would have if it were written now."""
        *_, last_part = section_parts(
            self.section(folder, number), map(self._chunk, self._chunks(number))
        )
        self._copied = None
        return int.from_bytes(last_part[-CHECKSUM_BYTES:], "little")

    def read_over(self, number: int, read: Callable[[torch.Tensor], None]) -> None:
        """Call ``read`` to fill a buffer with each chunk of an object's values, which are then discarded."""
        for piece in self._chunks(number):
            read(
                torch.empty(piece.numel, dtype=self.layout.groups[piece.group].dtype, device="cpu")
            )

    def parts(
        self, folder: str, number: int, written: Callable[[int], object] = bool
    ) -> Iterator[Buffer]:
        """The bytes of an object. ``written`` is called with the checksum of its values after the last of them was yielded."""
        beginning = self.header(number)
        yield beginning
        last_part: Buffer = b""
        for last_part in section_parts(
            self.section(folder, number), map(self._chunk, self._chunks(number))
        ):
            yield last_part
        self._copied = None
        sums = Sums(
            int.from_bytes(last_part[-CHECKSUM_BYTES:], "little"), self.header_checksum(number)
        )
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
        """A tensor as a flat one. If it is not contiguous, a copy is made, and kept until the next tensor is asked for."""
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
            f"model.state_dict(keep_vars=True), which is called to list the entries of the whole model, fails: "
            f"{type(error).__name__}: {error}. A state_dict() of your own must accept the same arguments as torch's, and return "
            "a dict."
        ) from error


def unsynced_key(folder: str, number: int) -> str:
    """Key of an object with tensors that are not synced."""
    return f"{folder}/{number:05}.safetensors"


def unsynced_seed(folder: str, number: int) -> int:
    """Seed of the checksum of the values in such an object."""
    return seed(fingerprint("unsynced"), folder, number)


def _can_be_stored(tensor: torch.Tensor) -> bool:
    plain = (
        type(tensor.detach()) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_meta
    )
    return plain and tensor.dtype in SAFETENSORS_DTYPES
