"""The records of a strict run: which process holds which rank, how each ended, and who is in a sync.

Each record is sealed (:mod:`._sealed`), and fields that repeat a part of its key must agree with the key.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..._checks import MOST_RANKS
from ..._errors import CorruptedObjectError, MismatchError
from ..._exchange._base import Schema
from ..._exchange._endings import Ending, Progress
from ..._host import host_name
from ..._wire._fields import LARGEST, Fields
from ..._wire._sealed import seal, unseal
from ..._wire._sections import fingerprint
from ._version import VERSION, check_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_CLAIM = re.compile(r"claims/([0-9]{5})(?:\.([0-9]{4,7}))?\.json")
_NOTE = re.compile(r"notes/([0-9]{5})(?:\.([0-9]{4,7}))?\.json")
_COMMIT = re.compile(r"commits/([0-9]{8})\.([0-9a-f]{16})\.json")


@dataclass(frozen=True, slots=True)
class Claim:
    """What a replica declares when it joins.

    Attributes:
        rank: The rank that it takes.
        world_size: Number of replicas.
        run_id: The launch that it belongs to, or "".
        chunk_bytes: Contributions have one checksum per so many bytes.
        schema: Digest of what all replicas must have in common; see :func:`schema_key`.
        nonce: Distinguishes processes that claim the same rank.
        host: The name of its machine.
        pid: The id of its process on that machine.
        beat_milliseconds: The time between two of its signs of life.
        life: Which life of its rank it is: 1 for the process that began the run, and one more for each that resumes it.
    """

    rank: int
    world_size: int
    run_id: str
    chunk_bytes: int
    schema: str
    nonce: str
    host: str
    pid: int
    beat_milliseconds: int
    life: int = 1

    @classmethod
    def of_this_process(
        cls,
        rank: int,
        world_size: int,
        run_id: str,
        chunk_bytes: int,
        schema: Schema,
        nonce: str,
        beat_interval: float,
    ) -> Claim:
        """The claim with which this process takes a rank of a new run.

        The arguments are as in the attributes, but ``beat_interval`` is in seconds.
        """
        digest, host, pid = schema_digest(schema), host_name(), os.getpid()
        beat = math.ceil(min(1000 * beat_interval, LARGEST))
        return cls(rank, world_size, run_id, chunk_bytes, digest, nonce, host, pid, beat)

    def silence(self, lost_after: float) -> float:
        """Seconds without a changed beat after which the process counts as lost.

        Args:
            lost_after: The same for a process that beats as often as the observer does.
        """
        return max(lost_after, 2 * self.beat_milliseconds / 1000)

    def to_bytes(self) -> bytes:
        """The claim as stored."""
        return seal(
            "claim",
            claim_key(self.rank, self.life),
            {
                "version": VERSION,
                "rank": self.rank,
                "world_size": self.world_size,
                "run_id": self.run_id,
                "chunk_bytes": self.chunk_bytes,
                "schema": self.schema,
                "nonce": self.nonce,
                "host": self.host,
                "pid": self.pid,
                "beat_milliseconds": self.beat_milliseconds,
            },
        )

    @classmethod
    def from_bytes(cls, data: bytes, rank: int, origin: str, life: int = 1) -> Claim:
        """The stored claim of a rank, by one of its lives.

        Raises:
            CorruptedObjectError: The claim is damaged, or it is not that of this rank and life.
            FormatError: Another version of diloco-core has written the record.
        """
        record = unseal("claim", claim_key(rank, life), data, origin)
        check_version(record, "claim", origin)
        fields = Fields(record, origin)
        fields.agree("rank", rank)
        return cls(
            rank,
            fields.whole("world_size", rank + 1, MOST_RANKS),
            fields.text("run_id"),
            fields.whole("chunk_bytes", 1),
            fields.text("schema", "[0-9a-f]{32}"),
            fields.text("nonce"),
            fields.text("host"),
            fields.whole("pid"),
            fields.whole("beat_milliseconds", 1),
            life,
        )


def claim_key(rank: int, life: int = 1) -> str:
    """Key of the claim of a rank by one of its lives. Lives share no keys but those of the tables of tensors."""
    return f"claims/{_name(rank, life)}.json"


def beat_key(rank: int, life: int = 1) -> str:
    """Key of the signs of life of a rank in one of its lives."""
    return f"beats/{_name(rank, life)}"


def schema_digest(schema: Schema) -> str:
    """A digest of what all replicas must have in common: 32 hexadecimal digits."""
    return fingerprint(list(schema.tensors.items()), list(schema.settings.items()))


def schema_key(digest: str) -> str:
    """Key of a table of tensors and settings. Replicas that agree write the same one, so they need not read each other's."""
    return f"schemas/{digest}.json"


def schema_record(schema: Schema) -> bytes:
    """The table of tensors and settings as stored. Replicas that agree write the same bytes."""
    key = schema_key(schema_digest(schema))
    return seal("schema", key, {"tensors": dict(schema.tensors), "settings": dict(schema.settings)})


def read_schema(data: bytes, digest: str, origin: str) -> Schema:
    """The stored table of tensors and settings that has this digest.

    Raises:
        CorruptedObjectError: The table is damaged, or has another digest.
        FormatError: Another version of diloco-core has written the record.
    """
    fields = Fields(unseal("schema", schema_key(digest), data, origin), origin)
    schema = Schema(fields.texts_by_name("tensors"), fields.texts_by_name("settings"))
    if schema_digest(schema) != digest:
        raise CorruptedObjectError(
            f"{origin} is damaged: it is not the table whose digest is in its name"
        )
    return schema


def claimed(keys: Iterable[str]) -> set[tuple[int, int]]:
    """The ranks whose claims are in a listing, each with the life that has claimed it; other keys are ignored."""
    return _ranks_and_lives(_CLAIM, keys)


def note_key(rank: int, life: int = 1) -> str:
    """Key of the note that says how a life of a rank has ended."""
    return f"notes/{_name(rank, life)}.json"


def noted(keys: Iterable[str]) -> set[tuple[int, int]]:
    """The ranks whose notes are in a listing, each with the life that the note is of; other keys are ignored."""
    return _ranks_and_lives(_NOTE, keys)


def run_name(claims: Iterable[Claim]) -> str:
    """A name that no other run has, not even an earlier one under the same prefix: 32 hexadecimal digits.

    Args:
        claims: The claims of all ranks, by the processes that have met.
    """
    return fingerprint("run", sorted((claim.rank, claim.nonce) for claim in claims))


def note(ending: Ending, nonce: str, life: int = 1) -> bytes:
    """The note that says how a replica ended, as stored.

    Args:
        ending: How it ended.
        nonce: The nonce of its claim.
        life: Which life of its rank it was.
    """
    return seal(
        "note",
        note_key(ending.rank, life),
        {
            "rank": ending.rank,
            "nonce": nonce,
            "event": ending.event,
            "number": ending.progress.number,
            "syncs": ending.progress.syncs,
            "message": ending.message,
            "cause_rank": -1 if ending.cause_rank is None else ending.cause_rank,
        },
    )


def read_note(data: bytes, rank: int, origin: str, life: int = 1) -> tuple[Ending, str]:
    """The ending that a stored note reports, and the nonce in the claim of the process that wrote it.

    Raises:
        CorruptedObjectError: The note is damaged, or it is not that of this rank and life.
        FormatError: Another version of diloco-core has written the record.
    """
    fields = Fields(unseal("note", note_key(rank, life), data, origin), origin)
    fields.agree("rank", rank)
    cause = fields.whole("cause_rank", -1, MOST_RANKS)
    event = fields.text("event", "left|failed")
    progress = Progress(fields.whole("number"), fields.whole("syncs"))
    kind: Literal["left", "failed"] = "left" if event == "left" else "failed"
    ending = Ending(rank, kind, progress, fields.text("message"), None if cause < 0 else cause)
    return ending, fields.text("nonce")


def commit_key(run: str, sync: int) -> str:
    """Key of the record that says who is in a sync; ``run`` is the name of the run.

    The key names the run, so that what a process of an earlier run writes under the same prefix is not taken for the record
    of this one.
    """
    return f"commits/{sync:08}.{run[:16]}.json"


def committed_sync(key: str) -> tuple[str, int] | None:
    """The beginning of a run's name, and the sync, whose record has this key; None if it is not the key of such a record."""
    match = _COMMIT.fullmatch(key)
    return (match[2], int(match[1])) if match else None


def commit(run: str, sync: int, name: str, members: Sequence[str]) -> bytes:
    """The commit record as stored. All replicas write the same bytes, so it does not matter if several of them do.

    Args:
        run: The name of the run.
        sync: Number of the sync in the exchange.
        name: Name of what is synced.
        members: Keys of the contributions in rank order.
    """
    keys = [{"rank": rank, "key": key} for rank, key in enumerate(members)]
    return seal("commit", commit_key(run, sync), {"sync": sync, "name": name, "members": keys})


def check_commit(
    data: bytes,
    run: str,
    sync: int,
    name: str,
    world_size: int,
    carried: Callable[[int, str], int | None],
    origin: str,
) -> list[str]:
    """The keys of the contributions that a stored commit record names, in rank order.

    Args:
        data: The stored bytes of the record.
        run: The name of the run.
        sync: Number of the sync in the exchange.
        name: Name of what is synced.
        world_size: How many members it must have.
        carried: Returns which groups the contribution with a rank and a key carries; None if it is not a contribution of this
            rank to this sync.
        origin: What the record is called in errors.

    Raises:
        CorruptedObjectError: The record is damaged.
        MismatchError: Another run has written the record.
        FormatError: Another version of diloco-core has written the record.
    """
    fields = Fields(unseal("commit", commit_key(run, sync), data, origin), origin)
    fields.agree("sync", sync)
    members = [member.text("key") for member in fields.parts("members")]
    if len(members) != world_size or any(
        carried(rank, key) is None for rank, key in enumerate(members)
    ):
        raise MismatchError(
            f"{origin} names other members than this run has, so another run has written it: give every run a prefix of its own"
        )
    if data != commit(run, sync, name, members):
        raise MismatchError(
            f"{origin} is not what the replicas of this run write, so another run has written it: give every run a prefix of its "
            "own"
        )
    return members


def _name(rank: int, life: int) -> str:
    return f"{rank:05}" if life == 1 else f"{rank:05}.{life:04}"


def _ranks_and_lives(pattern: re.Pattern[str], keys: Iterable[str]) -> set[tuple[int, int]]:
    matches = filter(None, map(pattern.fullmatch, keys))
    return {(int(match[1]), int(match[2] or 1)) for match in matches}
