"""The keys of an elastic run, and what they say.

Keys below the run's prefix::

    beginning.json                                 put     somebody uploads the initial state; gone when it is there
    manifest.json                                  create  what the run is; names the initial state
    claims/{rank}/{epoch}.json                     create  one life of a rank; the highest epoch is the rightful one
    deltas/{sync}/{rank}.{epoch}.{from}-{to}.{base}.{schema}.{groups}.safetensors    put  a contribution, immutable
    deltas/{sync}/hint.{rank}.{epoch}.join|leave|repair   put     advice, never a reason to decide
    commits/{sync}.json                            create  who is in a sync, or a rollback: the only thing that decides
    state/{sync}/{fragment}.{shard}.safetensors    create  parameters and outer state after the sync
    state/{sync}/{fragment}.done.json              create  all its shards are there: a place to start from
    initial/{nonce}/{fragment}.{shard}.safetensors put     the state before the first sync
    kept/{key}                                     create  a copy of a state that the run has gone back to, for some syncs
    inner/{rank}/{epoch}.{sync}.safetensors        put     what belongs to one replica alone
    unsynced/{nonce}/{number}.safetensors          put     what belongs to the model and is not synced; never deleted

Syncs count from 1; sync s is of fragment (s - 1) mod F. Keys that do not parse are not of the run, and are passed over.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


BEGINNING = "beginning.json"
MANIFEST = "manifest.json"
# Every number has one spelling, so that two keys are never of the same thing.
_EPOCH = r"(\d{4}|[1-9]\d{4,17})"
_DELTA = re.compile(
    rf"deltas/(\d{{8}})/(\d{{5}})\.{_EPOCH}\.(\d+)-(\d+)\.([0-9a-f]{{16}})\.([0-9a-f]{{16}})\.([0-9a-f]{{1,16}})\.safetensors",
    re.ASCII,
)
_HINT = re.compile(rf"deltas/(\d{{8}})/hint\.(\d{{5}})\.{_EPOCH}\.(join|leave|repair)", re.ASCII)
_CLAIM = re.compile(rf"claims/(\d{{5}})/{_EPOCH}\.json", re.ASCII)
_COMMIT = re.compile(r"commits/(\d{8})\.json", re.ASCII)
_INNER = re.compile(rf"inner/(\d{{5}})/{_EPOCH}\.(\d{{8}})\.safetensors", re.ASCII)
_MOST_SYNCS = 99_999_999


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
        schema: Name of the run and the fragment together; see :func:`._delta.schema`.
        groups: Which groups of values it carries, as bits; the others are as in the state that it was made from.
    """

    sync: int
    rank: int
    epoch: int
    start: int
    stop: int
    base: str
    schema: str
    groups: int = 1

    @property
    def key(self) -> str:
        """Its key."""
        who = f"{self.rank:05}.{self.epoch:04}.{self.start}-{self.stop}"
        return f"{deltas(self.sync)}{who}.{self.base}.{self.schema}.{self.groups:x}.safetensors"

    @classmethod
    def parse(cls, key: str) -> Delta | None:
        """The contribution that a key names, or None where it names none."""
        match = _DELTA.fullmatch(key)
        if match is None:
            return None
        sync, rank, epoch, start, stop = map(int, match.groups()[:5])
        delta = cls(sync, rank, epoch, start, stop, match[6], match[7], int(match[8], 16))
        return delta if delta.key == key else None


@dataclass(frozen=True, slots=True)
class Hint:
    """That a life is to be expected in a sync (``join``), or not any more (``leave``), or needs others to mend (``repair``)."""

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
        match = _HINT.fullmatch(key)
        if match is None:
            return None
        sync, rank, epoch, event = match.groups()
        return cls(int(sync), int(rank), int(epoch), event)


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


def epochs(keys: Iterable[str], rank: int) -> list[int]:
    """The lives that claims among these keys speak of, of one rank."""
    claims = [match for match in map(_CLAIM.fullmatch, keys) if match is not None]
    return sorted(int(match[2]) for match in claims if int(match[1]) == rank)


def highest_epochs(keys: Iterable[str]) -> dict[int, int]:
    """The highest claimed epoch of every rank."""
    highest: dict[int, int] = {}
    for match in filter(None, map(_CLAIM.fullmatch, keys)):
        rank, epoch = int(match[1]), int(match[2])
        highest[rank] = max(highest.get(rank, 0), epoch)
    return dict(sorted(highest.items()))


def is_claim(key: str) -> bool:
    """Whether a key is that of a life."""
    return _CLAIM.fullmatch(key) is not None


def commit_sync(key: str) -> int | None:
    """Which sync a record of the log is of, or None where the key is not that of one."""
    match = _COMMIT.fullmatch(key)
    return int(match[1]) if match else None


def inner_key(rank: int, epoch: int, sync: int) -> str:
    """Key of what a life has saved of its own. Keys sort by epoch first: a later life is always newer."""
    return f"inner/{rank:05}/{epoch:04}.{sync:08}.safetensors"


def parse_inner(key: str) -> tuple[int, int] | None:
    """Epoch and sync of what a life has saved of its own, or None where the key is not that of such an object."""
    match = _INNER.fullmatch(key)
    return (int(match[2]), int(match[3])) if match else None
