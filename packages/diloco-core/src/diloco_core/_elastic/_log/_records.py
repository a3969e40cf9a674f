"""The records of an elastic run: what lies in the store besides tensors. Their keys are in :mod:`._keys`.

Every record is sealed (:mod:`._sealed`): its bytes and its key are verified before anything is read from it.

Prefixes are emptied and used again, and a life of the run before may still write there. So everything is bound to its run,
whose name is the digest of its manifest: records of the log say it (:func:`of_run`), keys of contributions show it in their
``schema``, and the checksums of tensors have it in their seeds. The initial state, which the manifest names, is bound to its
nonce.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from ..._errors import RunExistsError
from ..._wire._fields import Fields
from ..._wire._sealed import seal, unseal
from ._keys import MANIFEST, Delta, commit_key, done_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

T = TypeVar("T", bound="Commit | Rollback | Done")
_DIGEST = "[0-9a-f]{16}"


@dataclass(frozen=True, slots=True)
class Commit:
    """The record of a sync.

    Attributes:
        sync: Its number.
        fragment: Index of the fragment.
        base: Digest of the fragment's state before.
        previous: Digest of the record before, or the name of the run.
        members: The contributions that count, in rank order.
        positions: Inner steps of every rank that the fragment's state has counted after this sync.
        outer_steps: Outer steps that the fragment's state has taken after this sync, given-up ones not counted.
        rollback: Number of the newest rollback before it; 0 where there was none.
        run: Name of the run.
    """

    sync: int
    fragment: int
    base: str
    previous: str
    members: tuple[Delta, ...]
    positions: Mapping[int, int]
    outer_steps: int
    rollback: int = 0
    run: str = field(kw_only=True)

    def to_json(self) -> bytes:
        """The record as stored."""
        return seal("commit", commit_key(self.sync), self.fields())

    def fields(self) -> dict[str, Any]:
        """What the record says, in its order."""
        members = [
            {"rank": m.rank, "epoch": m.epoch, "from": m.start, "to": m.stop, "key": m.key}
            for m in self.members
        ]
        return {
            "run": self.run,
            "sync": self.sync,
            "fragment": self.fragment,
            "base": self.base,
            "previous": self.previous,
            "rollback": self.rollback,
            "members": members,
            "positions": _pairs(self.positions),
            "outer_steps": self.outer_steps,
        }

    @classmethod
    def from_json(cls, data: bytes, sync: int, origin: str) -> Commit:
        """Read a stored record.

        Raises:
            CorruptedObjectError: It is not the record of this sync, as it was written.
            FormatError: Another version has written it.
        """
        return cls.from_fields(
            Fields(unseal("commit", commit_key(sync), data, origin), origin), sync
        )

    @classmethod
    def from_fields(cls, fields: Fields, sync: int) -> Commit:
        """The record that has these fields."""
        fields.agree("sync", sync)
        members = tuple(_member(member, sync) for member in fields.parts("members"))
        ranks = [member.rank for member in members]
        if not ranks or ranks != sorted(set(ranks)):
            raise fields.wrong("its members must be of different ranks, in order")
        positions = fields.numbers("positions")
        if any(positions.get(member.rank) != member.stop for member in members):
            raise fields.wrong("its positions are not those of its members")
        return cls(
            sync,
            fields.whole("fragment", 0, sync - 1),
            fields.text("base", _DIGEST),
            fields.text("previous", _DIGEST),
            members,
            positions,
            fields.whole("outer_steps", 1, sync),
            fields.whole("rollback", 0, sync - 1),
            run=fields.text("run", _DIGEST),
        )


@dataclass(frozen=True, slots=True)
class Rollback:
    """The record that a run goes on from older states: what was committed after them could not be had any more.

    It takes the place of a sync in the log, so it is decided as one. Nothing is deleted by it.

    Attributes:
        sync: Its number in the log.
        states: For every fragment, the sync whose state the run goes on from; 0 for the initial one.
        given_up: The syncs that are given up.
        fence: The highest epoch of every rank at that time; these lives stop, unless they agreed beforehand.
        rollback: Number of the rollback before it; 0 where there was none.
        run: Name of the run.
    """

    sync: int
    states: tuple[int, ...]
    given_up: tuple[int, ...]
    fence: Mapping[int, int]
    rollback: int = 0
    run: str = field(kw_only=True)

    def to_json(self) -> bytes:
        """The record as stored."""
        fields = {
            "run": self.run,
            "sync": self.sync,
            "states": list(self.states),
            "given_up": list(self.given_up),
            "fence": _pairs(self.fence),
            "rollback": self.rollback,
        }
        return seal("rollback", commit_key(self.sync), fields)

    @classmethod
    def from_json(cls, data: bytes, sync: int, origin: str) -> Rollback:
        """Read a stored record.

        Raises:
            CorruptedObjectError: It is not the record of this sync, as it was written.
            FormatError: Another version has written it.
        """
        fields = Fields(unseal("rollback", commit_key(sync), data, origin), origin)
        fields.agree("sync", sync)
        states = tuple(fields.wholes("states", 0, sync - 1))
        if not states or any(
            state and (state - 1) % len(states) != index for index, state in enumerate(states)
        ):
            raise fields.wrong("its states are not of the fragments that they stand for")
        given_up = tuple(fields.wholes("given_up", 1, sync - 1))
        fence, before = fields.numbers("fence", 1), fields.whole("rollback", 0, sync - 1)
        return cls(sync, states, given_up, fence, before, run=fields.text("run", _DIGEST))


def read_record(data: bytes, sync: int, origin: str) -> Commit | Rollback:
    """The record of the log with this number.

    Raises:
        CorruptedObjectError: It is not what was written.
        FormatError: Another version has written it.
    """
    if b'"kind": "rollback"' in data[:40]:  # if this is wrong, the checksum is too
        return Rollback.from_json(data, sync, origin)
    return Commit.from_json(data, sync, origin)


@dataclass(frozen=True, slots=True)
class Done:
    """That all shards of a fragment's state are published, and what they hold.

    Attributes:
        sync: After which sync, or 0 for the initial state.
        fragment: Index of the fragment.
        sums: Checksums of the shards' values.
        rests: Checksums of everything else in the shards' files.
        commit: The record of the sync, so that it can be written again; None for the initial state.
    """

    sync: int
    fragment: int
    sums: tuple[int, ...]
    rests: tuple[int, ...]
    commit: Commit | None

    @property
    def run(self) -> str:
        """Name of the run; empty for the initial state, which is what its manifest says."""
        return self.commit.run if self.commit else ""

    @property
    def positions(self) -> Mapping[int, int]:
        """Inner steps of every rank that this state has counted."""
        return self.commit.positions if self.commit else {}

    def to_json(self) -> bytes:
        """The record as stored."""
        if self.commit is None:
            raise ValueError("the initial state has no such record: the manifest names it")
        fields = {
            "sync": self.sync,
            "fragment": self.fragment,
            "sums": _hexadecimal(self.sums),
            "rests": _hexadecimal(self.rests),
            "commit_digest": digest(self.commit.to_json()),
            "commit": self.commit.fields(),
        }
        return seal("done", done_key(self.sync, self.fragment), fields)

    @classmethod
    def from_json(cls, data: bytes, sync: int, fragment: int, origin: str) -> Done:
        """Read a stored record.

        Raises:
            CorruptedObjectError: It is not the record of this state, as it was written.
            FormatError: Another version has written it.
        """
        fields = Fields(unseal("done", done_key(sync, fragment), data, origin), origin)
        fields.agree("sync", sync)
        fields.agree("fragment", fragment)
        commit = Commit.from_fields(fields.part("commit"), sync)
        if commit.fragment != fragment or digest(commit.to_json()) != fields.text(
            "commit_digest", _DIGEST
        ):
            raise fields.wrong(
                "the record of the sync that it holds is not the one that it was written for"
            )
        return cls(sync, fragment, _sums(fields, "sums"), _sums(fields, "rests"), commit)


def of_run(record: T, run: str, origin: str) -> T:
    """The record, if it is of this run.

    It is no damage that could be mended if it is not: nobody may write over it, and nobody may go on from it.

    Raises:
        RunExistsError: It is of another one.
    """
    if record.run != run:
        raise RunExistsError(
            f"{origin} is a record of another run (its manifest has the digest {record.run}, and that of this replica's run has "
            f"{run}). Most likely the prefix was emptied and used again while a replica of the run before was still running; or "
            "objects were copied there. Stop the replicas of the other run. If this is the only object of it, move that away and "
            "resume this run; otherwise begin this run on a prefix that was never used."
        )
    return record


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an elastic run is. Whoever creates it first decides.

    Attributes:
        run_id: The launch that began it.
        writer: The rank that wrote it.
        world_size: How many ranks there may be; also the number of shards of every fragment.
        min_replicas: How many must contribute to a sync.
        topology: ``sharded`` or ``gather``.
        publish_every: Every how many syncs of a fragment its state is published.
        retention: How many syncs a life may lag without reloading.
        settings: What the outer loops must have in common.
        tensors: Description of every tensor.
        fragments: Where in which file every tensor lies; see :attr:`._base.Schema.fragments`.
        initial: Nonce of the initial state.
        sums: Checksums of its shards' values, by fragment.
        rests: Checksums of everything else in its shards' files, by fragment.
        unsynced: What belongs to the model and is not synced, and where it lies; see :meth:`._unsynced.Unsynced.publish`.
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

    def run(self) -> str:
        """Name of the run."""
        return digest(self.to_json())

    def to_json(self) -> bytes:
        """The manifest as stored."""
        own = {name: getattr(self, name) for name in self.__slots__}
        own |= {name: [_hexadecimal(sums) for sums in own[name]] for name in ("sums", "rests")}
        return seal("manifest", MANIFEST, {"membership": "elastic", **own})

    @classmethod
    def from_json(cls, data: bytes, origin: str) -> Manifest:
        """Read a stored manifest.

        Raises:
            CorruptedObjectError: It is not what was written.
            FormatError: Another version has written it.
            RunExistsError: It is that of a strict run.
        """
        fields = Fields(unseal("manifest", MANIFEST, data, origin), origin)
        membership = fields.text("membership")
        if membership != "elastic":
            raise RunExistsError(
                f"{origin} is that of a {membership} run, which no elastic replica can join"
            )
        world_size = fields.whole("world_size", 1, 100_000)
        tables = fields.items("fragments")
        sums, rests = (
            [
                [int(value, 16) for value in Fields({"": row}, origin).texts("", _DIGEST)]
                for row in fields.items(name)
            ]
            for name in ("sums", "rests")
        )
        if not tables or not len(tables) == len(sums) == len(rests):
            raise fields.wrong("it has not one row of checksums for every fragment")
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
            initial=fields.text("initial", _DIGEST),
            sums=sums,
            rests=rests,
            unsynced=fields.mapping("unsynced"),
        )

    def done(self, fragment: int) -> Done:
        """The record of a fragment's initial state."""
        return Done(0, fragment, tuple(self.sums[fragment]), tuple(self.rests[fragment]), None)


def digest(data: bytes) -> str:
    """Digest of a record."""
    return xxhash.xxh3_64_hexdigest(data)


def state_digest(sums: Sequence[int]) -> str:
    """Digest of a fragment's state."""
    return digest(b"".join(value.to_bytes(8, "little") for value in sums))


def _member(fields: Fields, sync: int) -> Delta:
    delta = Delta.parse(fields.text("key"))
    if delta is None or delta.sync != sync:
        raise fields.wrong("its key is not that of a contribution to this sync")
    for name, value in (
        ("rank", delta.rank),
        ("epoch", delta.epoch),
        ("from", delta.start),
        ("to", delta.stop),
    ):
        fields.agree(name, value)
    return delta


def _pairs(numbers: Mapping[int, int]) -> list[list[int]]:
    return [[rank, number] for rank, number in sorted(numbers.items())]


def _hexadecimal(sums: Iterable[int]) -> list[str]:
    return [f"{value:016x}" for value in sums]


def _sums(fields: Fields, name: str) -> tuple[int, ...]:
    return tuple(int(value, 16) for value in fields.texts(name, _DIGEST))
