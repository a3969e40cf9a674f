"""The records of an elastic run: what lies in the store besides tensors, and under which keys.

Keys below the run's prefix::

    manifest.json                                  create  what the run is; names the initial state
    claims/{rank}/{epoch}.json                     create  one life of a rank; the highest epoch is the rightful one
    deltas/{sync}/{rank}.{epoch}.{from}-{to}.{base}.{schema}.safetensors    put  a contribution, immutable
    deltas/{sync}/hint.{rank}.{epoch}.join|leave   put     advice for waiting, never a reason to decide
    commits/{sync}.json                            create  who is in a sync: the only thing that decides
    state/{sync}/{fragment}.{shard}.safetensors    create  parameters and outer state after the sync
    state/{sync}/{fragment}.done.json              create  all its shards are there: a place to start from
    initial/{nonce}/{fragment}.{shard}.safetensors put     the state before the first sync

Syncs count from 1; sync s is of fragment (s - 1) mod F.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import xxhash

from ._errors import CorruptedObjectError, RunExistsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FORMAT = 2
MANIFEST = "manifest.json"

_DELTA = re.compile(
    r"deltas/(\d{8})/(\d{5})\.(\d{4,})\.(\d+)-(\d+)\.([0-9a-f]{16})\.([0-9a-f]{16})\.safetensors", re.ASCII
)
_HINT = re.compile(r"deltas/(\d{8})/hint\.(\d{5})\.(\d{4,})\.(join|leave)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Delta:
    """What the key of a contribution says.

    Attributes:
        sync: The sync that it is for.
        rank: Who made it.
        epoch: In which life.
        start: First of the rank's inner steps that it covers.
        stop: One past the last.
        base: Digest of the fragment's state that it was made from.
        schema: Beginning of the fragment's fingerprint.
    """

    sync: int
    rank: int
    epoch: int
    start: int
    stop: int
    base: str
    schema: str

    @property
    def key(self) -> str:
        """Its key."""
        who = f"{self.rank:05}.{self.epoch:04}.{self.start}-{self.stop}"
        return f"{deltas(self.sync)}{who}.{self.base}.{self.schema}.safetensors"

    @classmethod
    def parse(cls, key: str) -> Delta | None:
        """The contribution that a key names, or None where it names none."""
        found = _DELTA.fullmatch(key)
        if found is None:
            return None
        sync, rank, epoch, start, stop = map(int, found.groups()[:5])
        return cls(sync, rank, epoch, start, stop, *found.groups()[5:])


@dataclass(frozen=True, slots=True)
class Hint:
    """That a life is to be expected in a sync (``join``), or not any more (``leave``)."""

    sync: int
    rank: int
    epoch: int
    event: str

    @property
    def key(self) -> str:
        """Its key."""
        return f"{deltas(self.sync)}hint.{self.rank:05}.{self.epoch:04}.{self.event}"

    @classmethod
    def parse(cls, key: str) -> Hint | None:
        """The hint that a key is, or None."""
        found = _HINT.fullmatch(key)
        if found is None:
            return None
        sync, rank, epoch, event = found.groups()
        return cls(int(sync), int(rank), int(epoch), event)


@dataclass(frozen=True, slots=True)
class Commit:
    """The record of a sync.

    Attributes:
        sync: Its number.
        fragment: Index of the fragment.
        base: Digest of the fragment's state before.
        previous: Digest of the record before, or of the manifest.
        members: The contributions that count, in rank order.
    """

    sync: int
    fragment: int
    base: str
    previous: str
    members: tuple[Delta, ...]

    def to_json(self) -> bytes:
        """The record as stored."""
        members = [
            {"rank": m.rank, "epoch": m.epoch, "from": m.start, "to": m.stop, "key": m.key} for m in self.members
        ]
        record = {
            "format": FORMAT,
            "sync": self.sync,
            "fragment": self.fragment,
            "base": self.base,
            "previous": self.previous,
            "members": members,
        }
        return json.dumps(record, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, origin: str) -> Commit:
        """Read a stored record.

        Raises:
            CorruptedObjectError: It is none.
        """
        try:
            record = _load(data)
            members = tuple(Delta.parse(member["key"]) for member in record["members"])
            commit = cls(record["sync"], record["fragment"], record["base"], record["previous"], members)  # type: ignore[arg-type]
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptedObjectError(
                f"{origin} is no commit record that this version understands: {error}"
            ) from error
        if not members or None in members:
            raise CorruptedObjectError(f"{origin} names contributions that this version does not understand")
        return commit


@dataclass(frozen=True, slots=True)
class Done:
    """That all shards of a fragment's state are published.

    Attributes:
        sync: After which sync, or 0 for the initial state.
        fragment: Index of the fragment.
        sums: Checksums of the shards' values.
        positions: Inner steps of every rank that this state has counted.
    """

    sync: int
    fragment: int
    sums: tuple[int, ...]
    positions: Mapping[int, int]

    def to_json(self) -> bytes:
        """The record as stored."""
        record = {
            "format": FORMAT,
            "sync": self.sync,
            "fragment": self.fragment,
            "sums": [f"{value:016x}" for value in self.sums],
            "positions": {str(rank): position for rank, position in sorted(self.positions.items())},
        }
        return json.dumps(record, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, origin: str) -> Done:
        """Read a stored record.

        Raises:
            CorruptedObjectError: It is none.
        """
        try:
            record = _load(data)
            sums = tuple(int(value, 16) for value in record["sums"])
            positions = {int(rank): int(position) for rank, position in record["positions"].items()}
            return cls(record["sync"], record["fragment"], sums, positions)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptedObjectError(f"{origin} is no record that this version understands: {error}") from error


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
        fragments: Where in which file every tensor lies; see :meth:`._fragment.Fragment.table`.
        initial: Nonce of the initial state.
        sums: Checksums of its shards, by fragment.
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
    sums: Sequence[Sequence[str]] = field(repr=False)

    def to_json(self) -> bytes:
        """The manifest as stored."""
        own = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({"format": FORMAT, "membership": "elastic", **own}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, origin: str) -> Manifest:
        """Read a stored manifest.

        Raises:
            RunExistsError: It is that of a strict run, or none.
        """
        try:
            record: dict[str, Any] = json.loads(data)
            membership = record.pop("membership")
            if membership != "elastic":
                raise RunExistsError(f"{origin} is that of a {membership} run, which no elastic replica can join")
            if record.pop("format") != FORMAT:
                raise ValueError("its format is another one")
            return cls(**record)
        except (ValueError, KeyError, TypeError) as error:
            raise RunExistsError(
                f"{origin} is no manifest that this version understands ({error}). Use a prefix of its own for every run."
            ) from error

    def done(self, fragment: int) -> Done:
        """The record of a fragment's initial state."""
        return Done(0, fragment, tuple(int(value, 16) for value in self.sums[fragment]), {})


def deltas(sync: int) -> str:
    """The folder of a sync's contributions."""
    return f"deltas/{sync:08}/"


def commit_key(sync: int) -> str:
    """Key of a commit record."""
    return f"commits/{sync:08}.json"


def claim_key(rank: int, epoch: int) -> str:
    """Key of a life."""
    return f"claims/{rank:05}/{epoch:04}.json"


def done_key(sync: int, fragment: int) -> str:
    """Key of the record that a fragment's state is complete."""
    return f"state/{sync:08}/{fragment:03}.done.json"


def shard_key(sync: int, fragment: int, shard: int, initial: str) -> str:
    """Key of a shard; ``initial`` is the manifest's nonce."""
    folder = f"state/{sync:08}" if sync else f"initial/{initial}"
    return f"{folder}/{fragment:03}.{shard:05}.safetensors"


def digest(data: bytes) -> str:
    """Digest of a record."""
    return xxhash.xxh3_64_hexdigest(data)


def state_digest(sums: Sequence[int]) -> str:
    """Digest of a fragment's state."""
    return digest(b"".join(value.to_bytes(8, "little") for value in sums))


def _load(data: bytes) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(data)
    if record["format"] != FORMAT:
        raise ValueError(f"its format is {record['format']}, not {FORMAT}")
    return record
