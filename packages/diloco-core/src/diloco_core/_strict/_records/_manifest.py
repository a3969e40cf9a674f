"""The manifest of a strict run: what the run is, which names it has had, and which syncs count under each of them.

Whenever a run is resumed, it gets a new name, which is in the keys of everything that is written from then on, and a new
manifest, which says up to which sync each earlier name counts. Only the newest manifest is believed. So whatever a process from
before may still write when it wakes up late, it is never taken for a part of the run: its name does not count for its syncs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..._arithmetic._full_states import FullStates
from ..._checks import MOST_RANKS
from ..._errors import CorruptedObjectError
from ..._store._copies import copy_key
from ..._wire._fields import Fields
from ..._wire._sealed import seal, unseal
from ..._wire._tables import check_fragments
from ._version import VERSION, check_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MANIFEST = "manifest.json"

_LATER = re.compile(r"manifests/([0-9]{4,7})(\.copy)?\.json")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a strict run is since it was begun, or since it was last resumed.

    Attributes:
        run_id: The launch that began or resumed it.
        run: The name of the run; see :func:`._records.run_name`.
        world_size: Number of replicas.
        settings: The settings that the replicas have in common. ``committed`` is the number of outer steps that had been taken
            when the run began.
        tensors: The tensors that they have in common.
        fragments: For each fragment, the table that describes its files; empty for plain means.
        unsynced: The same for what belongs to the model and is not synced.
        members: For each rank, which process takes part: its life and its nonce.
        earlier: The names that the run had before, in order, each with the number of the last sync that counts under it. If
            the name before it has the same number, no sync counts under it.
        given_up: The beginnings of other names under which something had been published when the run was resumed: those of
            lives whose manifests were lost, so that the run went on without them. Nothing counts under these names.
    """

    run_id: str
    run: str
    world_size: int
    settings: Mapping[str, str]
    tensors: Mapping[str, str]
    fragments: Sequence[Mapping[str, Any]]
    unsynced: Mapping[str, Any]
    members: Sequence[tuple[int, str]]
    earlier: Sequence[tuple[str, int]] = field(default=())
    given_up: Sequence[str] = field(default=())

    @property
    def first(self) -> str:
        """The name with which the run was begun."""
        return self.earlier[0][0] if self.earlier else self.run

    @property
    def life(self) -> int:
        """The life of rank 0 that has written the manifest."""
        return self.members[0][0]

    @property
    def names(self) -> set[str]:
        """The beginnings of all names that the run has had, as they are in keys."""
        return {run[:16] for run in (self.run, *(name for name, _ in self.earlier))}

    @property
    def initial_steps(self) -> int:
        """Number of outer steps that had been taken when the run began."""
        return int(self.settings["committed"])

    def run_of(self, sync: int) -> str:
        """The name under which the sync of this number counts."""
        return run_of(self.earlier, self.run, sync)

    def counts(self, run: str, sync: int) -> bool:
        """Whether a sync counts under the name of the run that begins with ``run``."""
        return self.run_of(sync).startswith(run)

    def outer_steps(self, sync: int) -> int:
        """The number of outer steps after a sync. The first sync of each fragment only shares the initial values."""
        return self.initial_steps + max(0, sync + 1 - len(self.fragments))

    def fragment_of(self, sync: int) -> int:
        """Which fragment a sync is of."""
        count = len(self.fragments)
        return sync if sync < count else (self.outer_steps(sync) - 1) % count

    def last_syncs(self, sync: int) -> list[int]:
        """For each fragment, the number of its last sync when the sync of this number was the newest one of all."""
        count = len(self.fragments)
        last = list(range(count))
        # Each fragment has one turn in so many syncs, or it still has its initial values.
        for number in range(max(0, sync + 1 - count), sync + 1):
            last[self.fragment_of(number)] = number
        return last

    def full_states(self, index: int) -> FullStates:
        """Which published states of a fragment hold all values: all of them, unless the state is encoded."""
        return FullStates(
            int(self.settings.get("full_state_every", "1")), index, len(self.fragments)
        )

    def to_bytes(self) -> bytes:
        """The manifest as stored."""
        return seal(
            "manifest",
            manifest_key(self.life),
            {
                "run_id": self.run_id,
                "run": self.run,
                "world_size": self.world_size,
                "membership": "strict",
                "version": VERSION,
                "topology": "sharded",
                "settings": dict(self.settings),
                "tensors": dict(self.tensors),
                "fragments": [dict(fragment) for fragment in self.fragments],
                "unsynced": dict(self.unsynced),
                "members": [{"life": life, "nonce": nonce} for life, nonce in self.members],
                "earlier": [{"run": run, "last": last} for run, last in self.earlier],
                "given_up": list(self.given_up),
            },
        )

    @classmethod
    def from_bytes(cls, data: bytes, life: int, origin: str) -> Manifest:
        """The stored manifest that a life of rank 0 has written.

        Raises:
            CorruptedObjectError: The manifest is damaged, or it is not that of a strict run.
            FormatError: Another version of diloco-core has written the record.
        """
        record = unseal("manifest", manifest_key(life), data, origin)
        fields = Fields(record, origin)
        fields.text("membership", "strict")
        check_version(record, "manifest", origin)
        world_size = fields.whole("world_size", 1, MOST_RANKS)
        check_fragments(fields)
        if record["fragments"]:
            fields.part("settings").text("committed")
        manifest = cls(
            fields.text("run_id"),
            fields.text("run", "[0-9a-f]{32}"),
            world_size,
            fields.texts_by_name("settings"),
            fields.texts_by_name("tensors"),
            record["fragments"],
            record["unsynced"],
            [(part.whole("life", 1), part.text("nonce")) for part in fields.parts("members")],
            [
                (part.text("run", "[0-9a-f]{32}"), part.whole("last"))
                for part in fields.parts("earlier")
            ],
            fields.texts("given_up", "[0-9a-f]{16}"),
        )
        ends = [last for _, last in manifest.earlier]
        if len(manifest.members) != world_size or manifest.life != life or ends != sorted(ends):
            raise fields.wrong(
                "it does not name one process of every rank, or no order of its lives"
            )
        if bool(ends) == (life == 1) or manifest.names.intersection(manifest.given_up):
            raise fields.wrong("the names that it gives do not fit together")
        return manifest


def check_descent(first: Manifest | None, newest: Manifest, uri: str) -> None:
    """Refuse a later manifest of another run than the one that the prefix was begun with.

    Args:
        first: The manifest of the first life; None if it cannot be read, and then nothing can be compared.
        newest: A manifest of a later life.
        uri: Where they are.

    Raises:
        CorruptedObjectError: They are of two runs.
    """
    if first is not None and newest.first != first.run:
        key = manifest_key(newest.life)
        raise CorruptedObjectError(
            f"{uri}/{key} belongs to another run than {uri}/{MANIFEST}: two runs have used this prefix, and objects of one of "
            f"them are left. To go on with the run of {MANIFEST}, move {key} and {copy_key(key)} away. To go on with the other "
            f"run, put its own {MANIFEST} back ({copy_key(MANIFEST)} may have the same bytes), or move {MANIFEST} away"
        )


def run_of(earlier: Iterable[tuple[str, int]], run: str, sync: int) -> str:
    """The name under which the sync of this number counts; see :class:`Manifest`."""
    return next((name for name, last in earlier if sync <= last), run)


def cut(manifest: Manifest, sync: int) -> list[tuple[str, int]]:
    """The earlier names of a run that is resumed after a sync, each with the last sync that counts under it.

    Names under which no sync counts are listed too, so that what was written under them is known to belong to this run.
    """
    return [(name, min(last, sync)) for name, last in [*manifest.earlier, (manifest.run, sync)]]


def manifest_key(life: int) -> str:
    """Key of the manifest that a life of rank 0 writes.

    No two lives share one, so a process that wakes up late cannot replace a newer manifest.
    """
    return MANIFEST if life == 1 else f"manifests/{life:04}.json"


def manifest_keys(life: int) -> tuple[str, str]:
    """The keys of a manifest's copy and of the manifest, which is written last: as soon as it is there, others go on."""
    key = manifest_key(life)
    return copy_key(key), key


def lives_listed(keys: Iterable[str]) -> list[int]:
    """The lives of rank 0 whose manifests, or copies of them, are in a listing of ``manifests/``, the newest first."""
    matches = filter(None, map(_LATER.fullmatch, keys))
    return sorted({int(match[1]) for match in matches}, reverse=True)
