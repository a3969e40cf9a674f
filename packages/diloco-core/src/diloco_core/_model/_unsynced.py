"""The tensors of a model's ``state_dict()`` that are not synced.

They are frozen parameters, and buffers under ``buffers="none"``.

They are stored once, when the run begins, so that the store holds the whole model. The run's
manifest has their checksums.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
import xxhash

from .._arithmetic._layout import CHUNK_BYTES, Layout, Piece, Rule
from .._errors import ConfigurationError
from .._store._api import Buffer
from .._wire._published import END, Sums, ending
from .._wire._safetensors import SAFETENSORS_DTYPES
from .._wire._sections import Section, fingerprint, header, section_parts, seed
from ._partition import NamedTensor
from ._segments import arrange, tensor_table
from ._values import is_plain, plain_name

OBJECT_BYTES = 256 * 2**20
"""The most bytes of values in one object."""

# The name that torch gives to the result of a module's get_extra_state().
_EXTRA_STATE = "_extra_state"


class Unsynced:
    """The entries of a model's ``state_dict()`` that are not synced tensors.

    Attributes:
        tensors: The tensors that are not synced, each under its first name.
        layout: How their values are cut into objects.
        aliases: Further names of tensors, synced or not, with the first name of each.
        omitted: Names of entries that cannot be stored: extra state, and values computed by hooks.
        special: Tensors of the model that cannot be stored, with what they are (such as quantised).

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
            elif not is_plain(tensor) or tensor.dtype not in SAFETENSORS_DTYPES:
                self.special[name] = f"{type(tensor.detach()).__name__}, {tensor.dtype}"
            else:
                names[id(tensor)] = name
                self.tensors.append(NamedTensor(name, tensor, Rule.FIRST))
        groups, self._segments = arrange(self.tensors)
        size = sum(named.wire_bytes for named in self.tensors)
        self.layout = Layout(groups, max(1, -(-size // OBJECT_BYTES)))

    def publish(
        self, put: Callable[[str, Callable[[], Iterable[Buffer]]], object]
    ) -> dict[str, Any]:
        """Store the values. Returns the table that describes them in the run's manifest.

        Args:
            put: Given a key and a function that returns the parts, writes an object; it may call
                the function again.
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
            parts = partial(self._parts, folder, number, checksums.append)
            put(unsynced_key(folder, number), parts)
            sums.append(f"{checksums[-1]:016x}")
        return table

    def _parts(
        self, folder: str, number: int, written: Callable[[int], object]
    ) -> Iterator[Buffer]:
        """The bytes of an object; ``written`` is called with the checksum of its values."""
        section = Section("values", self.layout.shard(number), unsynced_seed(folder, number))
        beginning = unsynced_header(self.layout, section, number)
        yield beginning
        # If a tensor is not contiguous, a copy is made, and kept until the next one is asked for.
        flat = lru_cache(maxsize=1)(_flat)
        pieces = self.layout.chunks(number, CHUNK_BYTES)
        values = yield from section_parts(section, (self._chunk(piece, flat) for piece in pieces))
        yield ending(Sums(values, xxhash.xxh3_64_intdigest(beginning)))
        written(values)

    def _chunk(self, piece: Piece, flat: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        dtype = self.layout.groups[piece.group].dtype
        out = torch.empty(piece.numel, dtype=dtype, device="cpu")
        for segment in self._segments[piece.group]:
            start, stop = max(piece.start, segment.start), min(piece.stop, segment.stop)
            if start < stop:
                values = flat(segment.named.tensor)
                out[start - piece.start : stop - piece.start].copy_(
                    values[start - segment.start : stop - segment.start]
                )
        return out


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)


def _entries(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    try:
        return dict(model.state_dict(keep_vars=True))
    except Exception as error:
        raise ConfigurationError(
            "model.state_dict(keep_vars=True), which is called to list the entries of the whole "
            f"model, fails: {type(error).__name__}: {error}. A state_dict() of your own must "
            "accept the same arguments as torch's, and return a dict."
        ) from error


def unsynced_key(folder: str, number: int) -> str:
    """Key of an object with tensors that are not synced."""
    return f"{folder}/{number:05}.safetensors"


def unsynced_seed(folder: str, number: int) -> int:
    """Seed of the checksum of the values in such an object."""
    return seed(fingerprint("unsynced"), folder, number)


def unsynced_header(layout: Layout, values: Section, number: int) -> bytes:
    """Return the header of such an object, whose checksum is stored at the object's end."""
    return header(layout, [values, *END], {"diloco": "unsynced", "shard": str(number)})
