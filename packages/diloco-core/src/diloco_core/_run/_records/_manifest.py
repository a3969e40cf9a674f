"""The manifest of a run: the record that says what the run is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..._arithmetic._rate import NO_RATE, Rate
from ..._wire._fields import Fields
from ..._wire._sealed import seal, unsealed_fields
from ..._wire._tables import check_fragments
from ._keys import MANIFEST
from ._records import DIGEST, Done, digest, hexadecimal, sums_in


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
        fields |= {
            name: [hexadecimal(checksums) for checksums in fields[name]]
            for name in ("sums", "rests")
        }
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
        check_fragments(fields)
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
