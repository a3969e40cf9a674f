"""The tensors of a model's ``state_dict()`` that are not synced.

They are frozen parameters, and buffers under ``buffers="none"``.

They are stored once, when the run begins, so that the store holds the whole model. The run's
manifest has their checksums, so when an object is lost or damaged, a replica can find out whether
its own tensors hold the same values, and then write it again.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xxhash

from .._arithmetic._layout import CHUNK_BYTES, Layout, Piece, Rule
from .._errors import ConfigurationError, CorruptedObjectError
from .._store._api import Buffer, ObjectReader
from .._store._patient import Patient
from .._store._reread import read_again
from .._wire._published import END, Sums, ValuesReader, ending
from .._wire._safetensors import SAFETENSORS_DTYPES
from .._wire._sections import (
    CHECKSUM_BYTES,
    Parts,
    Section,
    fingerprint,
    header,
    result_of,
    section_bytes,
    section_parts,
    seed,
)
from ._partition import NamedTensor
from ._segments import arrange, tensor_table
from ._values import is_plain, plain_name

_log = logging.getLogger("diloco_core")

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
        self._copied: tuple[int, torch.Tensor] | None = None

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
            "shards": 0,  # comes first, as in every manifest of this format
            "sums": sums,
            **self.place(),
            "aliases": self.aliases,
            "omitted": self.omitted,
            **({"special": self.special} if self.special else {}),
        }
        for number in range(table["shards"]):
            checksums: list[int] = []  # the parts may be asked for again: the last checksum counts
            put(unsynced_key(folder, number), partial(self.parts, folder, number, checksums.append))
            sums.append(f"{checksums[-1]:016x}")
        return table

    def place(self) -> dict[str, Any]:
        """Return the part of that table which says where each tensor is."""
        shards = self.layout.shards if self.tensors else 0
        return {"shards": shards, **tensor_table(self.layout, self._segments)}

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
        values = section_bytes(self.layout, self.section("", number))
        return len(self.header(number)) + values + CHECKSUM_BYTES * len(END)

    def parts(self, folder: str, number: int, written: Callable[[int], object] = bool) -> Parts:
        """The bytes of an object.

        Returns the checksum of its values; ``written`` is called with it after the last byte.
        """
        yield self.header(number)
        chunks = map(self._chunk, self.chunks(number))
        values = yield from section_parts(self.section(folder, number), chunks)
        self._copied = None
        yield ending(Sums(values, self.header_checksum(number)))
        written(values)
        return values

    def chunks(self, number: int) -> tuple[Piece, ...]:
        """The chunks of an object, in order."""
        return self.layout.chunks(number, CHUNK_BYTES)

    def empty(self, piece: Piece) -> torch.Tensor:
        """Memory for the values of a chunk."""
        return torch.empty(piece.numel, dtype=self.layout.groups[piece.group].dtype, device="cpu")

    def _chunk(self, piece: Piece) -> torch.Tensor:
        out = self.empty(piece)
        for segment in self._segments[piece.group]:
            start, stop = max(piece.start, segment.start), min(piece.stop, segment.stop)
            if start < stop:
                values = self._flat(segment.named.tensor)
                out[start - piece.start : stop - piece.start].copy_(
                    values[start - segment.start : stop - segment.start]
                )
        return out

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as a flat one.

        If it is not contiguous, a copy is made, and kept until the next tensor is asked for.
        """
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


@dataclass(eq=False)
class UnsyncedWatch:
    """Checks that the objects with the tensors that are not synced are there and whole.

    Not thread-safe.

    Args:
        store: The run's prefix.
        rank: The rank of this replica, for the log.
        table: The table in the run's manifest that describes the objects; empty if there are none.
        own_tensors: The same tensors of this replica's model.
    """

    store: Patient
    rank: int
    table: Mapping[str, Any]
    own_tensors: Unsynced | None

    def __post_init__(self) -> None:
        self._folder = str(self.table.get("folder", ""))
        self._sums = [int(checksum, 16) for checksum in self.table.get("sums", ())]
        if self.own_tensors is not None and not (
            self.own_tensors.place().items() <= self.table.items()
        ):
            self.own_tensors = None
        self._reported: set[int] = set()

    def look(self, part: int = 0, parts: int = 1, *, whole: bool = False) -> None:
        """Check objects, and write those again that are gone or have a wrong size.

        With ``whole``, damaged ones are written again, too.

        Takes one listing if there is anything to check.

        Args:
            part: The objects ``part``, ``part + parts``, … are checked.
            parts: 1 for all of them.
            whole: Read the objects, which also shows damage inside them.
        """
        numbers = range(part, len(self._sums), parts)
        if not numbers:
            return
        listing = self.store.list(f"{self._folder}/")
        for number in numbers:
            damage = self._damage_in_listing(number, listing)
            if damage is None and whole:
                damage = self._damage_inside(number)
            if damage is not None:
                self._write_again(number, damage)

    def _damage_in_listing(self, number: int, listing: Mapping[str, int]) -> str | None:
        """The damage to an object that its listing shows; None if it shows none."""
        key = unsynced_key(self._folder, number)
        if key not in listing:
            return f"{self._origin(key)} is gone"
        size = self.own_tensors and self.own_tensors.object_bytes(number)
        if size is not None and listing[key] != size:
            return f"{self._origin(key)} has {listing[key]} bytes, not {size}"
        return None

    def _damage_inside(self, number: int) -> str | None:
        """Return the damage to an object that reading it shows.

        None if it is whole, or cannot be compared.
        """
        if self.own_tensors is None:
            return None
        key, own_tensors = unsynced_key(self._folder, number), self.own_tensors
        expected = Sums(self._sums[number], own_tensors.header_checksum(number))

        def use(reader: ObjectReader) -> bool:
            header = bytearray(len(own_tensors.header(number)))
            if reader.size < len(header):
                raise CorruptedObjectError(f"{self._origin(key)} is truncated")
            reader.read_into(0, memoryview(header))
            section = own_tensors.section(self._folder, number)
            values = ValuesReader(reader, own_tensors.layout, section, self._origin(key))
            for piece in own_tensors.chunks(number):
                values.read(own_tensors.empty(piece))
            if bytes(header) != own_tensors.header(number) or values.verified_sums() != expected:
                raise CorruptedObjectError(f"{self._origin(key)} is damaged")
            return True

        try:
            # Only two further readings, since the other replicas may be waiting. If the object is
            # not damaged after all, the same bytes are just written once more.
            if read_again(self.store.timing, partial(self.store.read, key, use), most=2):
                return None
        except CorruptedObjectError as error:
            return str(error).rstrip(".")
        return f"{self._origin(key)} is gone"

    def _write_again(self, number: int, damage: str) -> None:
        key = unsynced_key(self._folder, number)
        own = self.own_tensors
        if own is not None and result_of(own.parts(self._folder, number)) == self._sums[number]:
            _log.error(
                "rank %d: %s. It is written again with the same content. Something outside the "
                "run deletes or changes its objects.",
                self.rank,
                damage,
            )
            self.store.put(key, partial(own.parts, self._folder, number))
        elif number not in self._reported:
            self._reported.add(number)
            _log.error(
                "rank %d: %s. It holds tensors that are not synced (frozen parameters, buffers "
                "under buffers='none'). This replica cannot write it again, because its model "
                "holds other values than at the start of the run. Unless another replica can "
                "write it, export() can only write the synced tensors (synced_only=True).",
                self.rank,
                damage,
            )

    def _origin(self, key: str) -> str:
        return f"{self.store.uri}/{key}"
