"""The manifest of a run: the record that says what the run is.

Its tables say where each tensor is in the files of the run. Until they are checked, no number in
them is taken for a size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..._arithmetic._layout import Rule
from ..._arithmetic._rate import NO_RATE, Rate
from ..._wire._safetensors import SAFETENSORS_DTYPES
from ..._wire._sealed import LARGEST, Fields, seal, unsealed_fields
from ._keys import MANIFEST
from ._records import DIGEST, Done, digest, hexadecimal, sums_in

_MOST_SHARDS = 10**5  # they have five digits in keys

DTYPES = {str(dtype): dtype for dtype in SAFETENSORS_DTYPES}
"""The dtypes by the names that they have in manifests."""

_RULES = "|".join(Rule)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a run. It is created once; the first replica to create it decides.

    Attributes:
        run_id: The launch that began the run.
        writer: The rank that wrote the manifest.
        world_size: How many ranks there may be.
        min_replicas: How many replicas must contribute to a sync.
        topology: ``sharded`` or ``gather``.
        publish_every: The number of syncs of a fragment from one publication of its state to the
            next (gather).
        retention: How many syncs an incarnation may lag behind without reloading.
        settings: The settings that the outer loops must have in common.
        tensors: A description of every tensor, by name.
        fragments: In which file, and where in it, every tensor lies; see
            :attr:`._base.Schema.fragments`.
        initial: Nonce of the initial state.
        sums: Checksums of the values in the initial state's shards, by fragment.
        rests: Checksums of everything else in the files of these shards, by fragment.
        unsynced: What belongs to the model without being synced, and where it lies; see
            :meth:`._unsynced.Unsynced.publish`.
        membership: ``elastic``; or ``fixed``, where all ranks are in every sync.
        rate: The learning rate of the last outer step before the run began, if the run goes on with
            one that was asked for.
    """

    run_id: str
    writer: int
    world_size: int
    min_replicas: int
    topology: str
    publish_every: int
    retention: int
    settings: Mapping[str, str]
    tensors: Mapping[str, str]
    fragments: Sequence[Mapping[str, Any]] = field(repr=False)
    initial: str
    sums: Sequence[Sequence[int]] = field(repr=False)
    rests: Sequence[Sequence[int]] = field(repr=False)
    unsynced: Mapping[str, Any] = field(repr=False)
    membership: str = "elastic"
    rate: Rate = NO_RATE

    def run(self) -> str:
        """Name of the run."""
        return digest(self.to_json())

    def to_json(self) -> bytes:
        """The manifest as stored."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        for name in ("sums", "rests"):
            fields[name] = [hexadecimal(checksums) for checksums in fields[name]]
        rate: Rate = fields.pop("rate")
        if rate.number:
            fields["rate"] = rate.text
        return seal("manifest", MANIFEST, {"membership": fields.pop("membership"), **fields})

    @classmethod
    def from_json(cls, data: bytes, origin: str) -> Manifest:
        """Read a stored manifest.

        Raises:
            CorruptedObjectError: The data is not what was written.
            FormatError: Another version has written it.
        """
        fields = unsealed_fields("manifest", MANIFEST, data, origin)
        world_size = fields.whole("world_size", 1, 100_000)
        tables = fields.items("fragments")
        sums, rests = (
            [list(sums_in(Fields({"": row}, origin), "")) for row in fields.items(name)]
            for name in ("sums", "rests")
        )
        _check_fragments(fields)
        shards = [table["shards"] for table in tables]
        means = "operation" in fields.texts_by_name("settings")
        if means != (not tables) or not shards == list(map(len, sums)) == list(map(len, rests)):
            raise fields.wrong("it does not have one checksum for every shard of every fragment")
        rate = Rate.parse(fields.text("rate")) if "rate" in fields.names() else NO_RATE
        if rate is None:
            raise fields.wrong("it does not name a learning rate")
        return cls(
            run_id=fields.text("run_id"),
            writer=fields.whole("writer", 0, world_size - 1),
            world_size=world_size,
            min_replicas=fields.whole("min_replicas", 1, world_size),
            topology=fields.text("topology", "sharded|gather"),
            publish_every=fields.whole("publish_every", 1),
            retention=fields.whole("retention", 1),
            settings=fields.texts_by_name("settings"),
            tensors=fields.texts_by_name("tensors"),
            fragments=tables,
            initial=fields.text("initial", DIGEST),
            sums=sums,
            rests=rests,
            unsynced=fields.mapping("unsynced"),
            membership=fields.text("membership", "elastic|fixed"),
            rate=rate,
        )

    @property
    def first(self) -> int:
        """The number of outer steps that the model had taken when the run began.

        The first sync has the next number.
        """
        return int(self.settings.get("committed", "0"))

    def done(self, fragment: int) -> Done:
        """The record of a fragment's initial state."""
        return Done(0, fragment, tuple(self.sums[fragment]), tuple(self.rests[fragment]), None)


def _check_fragments(fields: Fields) -> None:
    """Check the tables of a manifest's fragments, and what is not synced.

    Raises:
        CorruptedObjectError: A table is not one that a run writes. The message names the field.
    """
    for table in fields.parts("fragments"):
        table.text("name")
        table.text("fingerprint", "[0-9a-f]{32}")
        table.whole("shards", 1, _MOST_SHARDS)
        _check_table(table)
    unsynced = fields.part("unsynced")
    if unsynced.names():
        _check_unsynced(unsynced)
    settings = fields.texts_by_name("settings")
    for name, least in (("committed", "0"), ("full_state_every", "1")):
        if name in settings:
            fields.part("settings").text(name, rf"[{least}-9][0-9]{{0,17}}")


def _check_unsynced(table: Fields) -> None:
    table.text("folder", "unsynced/[0-9a-f]{16}")
    sums = table.texts("sums", DIGEST)
    if table.whole("shards", 0, _MOST_SHARDS) != len(sums):
        raise table.wrong("it does not have one checksum for every shard")
    _check_table(table)
    table.texts_by_name("aliases")
    table.texts("omitted")
    if "special" in table.names():
        table.texts_by_name("special")


def _check_table(table: Fields) -> None:
    """Check groups and tensors: the tensors of a group have to fill it, one after another."""
    ends: list[int] = []
    itemsizes: list[int] = []
    for group in table.parts("groups"):
        dtype = DTYPES.get(group.text("dtype"))
        if dtype is None:
            raise group.wrong("this version of torch does not know its dtype")
        itemsizes.append(dtype.itemsize)
        ends.append(group.whole("numel", 0, LARGEST // 16))
        group.text("rule", _RULES)
    if itemsizes != sorted(itemsizes, reverse=True):
        raise table.wrong("its groups are not in order of their dtypes, the widest first")
    if "block" in table.names():
        table.whole("block", 1, 2**31)
    filled = [0] * len(ends)
    names = set()
    for entry in table.items("tensors"):
        if not _is_tensor(entry, filled):
            raise table.wrong(
                f"the entry of a tensor is wrong, or not in its place: {entry!r:.200}"
            )
        filled[entry["group"]] += math.prod(entry["shape"])
        names.add(entry["name"])
    if filled != ends or len(names) != len(table.items("tensors")):
        raise table.wrong("its tensors do not fill its groups, or have names in common")


def _is_tensor(entry: Any, filled: list[int]) -> bool:
    """Say whether an entry is a tensor that begins where the one before it in its group ended.

    Written for speed: a manifest may have hundreds of thousands of entries.
    """
    if not isinstance(entry, dict):
        return False
    name, group, start = entry.get("name"), entry.get("group"), entry.get("start")
    shape, dtype = entry.get("shape"), entry.get("dtype")
    return (
        type(name) is str
        and type(group) is int
        and 0 <= group < len(filled)
        and type(start) is int
        and start == filled[group]
        and isinstance(shape, list)
        and all(type(size) is int and 0 <= size <= LARGEST for size in shape)
        and len(shape) <= 64
        and type(dtype) is str
        and dtype in DTYPES
    )
