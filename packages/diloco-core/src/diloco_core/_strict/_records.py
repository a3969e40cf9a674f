"""The records of a strict run: which process holds which rank, how each ended, who is in a sync, and what the run is.

Each record is sealed (:mod:`._sealed`), and fields that repeat a part of its key must agree with the key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .._checks import MOST_RANKS
from .._errors import CorruptedObjectError, MismatchError
from .._exchange._base import Schema
from .._exchange._endings import Ending, Progress
from .._wire._fields import Fields
from .._wire._sealed import seal, unseal
from .._wire._sections import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

MANIFEST = "manifest.json"

_CLAIM = re.compile(r"claims/([0-9]{5})\.json")
_NOTE = re.compile(r"notes/([0-9]{5})\.json")
_COMMIT = re.compile(r"commits/([0-9]{8})\.json")


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
    """

    rank: int
    world_size: int
    run_id: str
    chunk_bytes: int
    schema: str
    nonce: str
    host: str
    pid: int

    def to_bytes(self) -> bytes:
        """The claim as stored."""
        return seal(
            "claim",
            claim_key(self.rank),
            {
                "rank": self.rank,
                "world_size": self.world_size,
                "run_id": self.run_id,
                "chunk_bytes": self.chunk_bytes,
                "schema": self.schema,
                "nonce": self.nonce,
                "host": self.host,
                "pid": self.pid,
            },
        )

    @classmethod
    def from_bytes(cls, data: bytes, rank: int, origin: str) -> Claim:
        """The stored claim of a rank.

        Raises:
            CorruptedObjectError: The claim is damaged, or it is not that of this rank.
            FormatError: Another version of diloco-core has written the record.
        """
        fields = Fields(unseal("claim", claim_key(rank), data, origin), origin)
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
        )


def claim_key(rank: int) -> str:
    """Key of the claim of a rank."""
    return f"claims/{rank:05}.json"


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


def claimed_ranks(keys: Iterable[str]) -> Iterator[int]:
    """The ranks whose claims are in a listing; other keys are ignored."""
    return _ranks(_CLAIM, keys)


def note_key(rank: int) -> str:
    """Key of the note that says how a rank ended."""
    return f"notes/{rank:05}.json"


def noted_ranks(keys: Iterable[str]) -> Iterator[int]:
    """The ranks whose notes are in a listing; other keys are ignored."""
    return _ranks(_NOTE, keys)


def run_name(claims: Iterable[Claim]) -> str:
    """A name that no other run has, not even an earlier one under the same prefix: 32 hexadecimal digits.

    Args:
        claims: The claims of all ranks, by the processes that have met.
    """
    return fingerprint("run", sorted((claim.rank, claim.nonce) for claim in claims))


def note(ending: Ending, nonce: str) -> bytes:
    """The note that says how a replica ended, as stored.

    Args:
        ending: How it ended.
        nonce: The nonce of its claim.
    """
    return seal(
        "note",
        note_key(ending.rank),
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


def read_note(data: bytes, rank: int, origin: str) -> tuple[Ending, str]:
    """The ending that a stored note reports, and the nonce in the claim of the process that wrote it.

    Raises:
        CorruptedObjectError: The note is damaged, or it is not that of this rank.
        FormatError: Another version of diloco-core has written the record.
    """
    fields = Fields(unseal("note", note_key(rank), data, origin), origin)
    fields.agree("rank", rank)
    cause = fields.whole("cause_rank", -1, MOST_RANKS)
    event = fields.text("event", "left|failed")
    progress = Progress(fields.whole("number"), fields.whole("syncs"))
    kind: Literal["left", "failed"] = "left" if event == "left" else "failed"
    ending = Ending(rank, kind, progress, fields.text("message"), None if cause < 0 else cause)
    return ending, fields.text("nonce")


def commit_key(sync: int) -> str:
    """Key of the record that says who is in a sync."""
    return f"commits/{sync:08}.json"


def committed_sync(key: str) -> int | None:
    """The sync whose record has this key; None if it is not the key of such a record."""
    match = _COMMIT.fullmatch(key)
    return int(match[1]) if match else None


def commit(sync: int, name: str, members: Sequence[str]) -> bytes:
    """The commit record as stored. All replicas write the same bytes, so it does not matter if several of them do.

    Args:
        sync: Number of the sync in the exchange.
        name: Name of what is synced.
        members: Keys of the contributions in rank order.
    """
    keys = [{"rank": rank, "key": key} for rank, key in enumerate(members)]
    return seal("commit", commit_key(sync), {"sync": sync, "name": name, "members": keys})


def check_commit(
    data: bytes,
    sync: int,
    name: str,
    world_size: int,
    carried: Callable[[int, str], int | None],
    origin: str,
) -> list[str]:
    """The keys of the contributions that a stored commit record names, in rank order.

    Args:
        data: The stored bytes of the record.
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
    fields = Fields(unseal("commit", commit_key(sync), data, origin), origin)
    fields.agree("sync", sync)
    members = [member.text("key") for member in fields.parts("members")]
    if len(members) != world_size or any(
        carried(rank, key) is None for rank, key in enumerate(members)
    ):
        raise MismatchError(
            f"{origin} names other members than this run has, so another run has written it: give every run a prefix of its own"
        )
    if data != commit(sync, name, members):
        raise MismatchError(
            f"{origin} is not what the replicas of this run write, so another run has written it: give every run a prefix of its "
            "own"
        )
    return members


def manifest(
    run_id: str, run: str, world_size: int, schema: Schema, unsynced: Mapping[str, Any]
) -> bytes:
    """The manifest as stored: what the run is, for people and for ``export``.

    Args:
        run_id: The launch that it belongs to.
        run: The name of the run; see :func:`run_name`.
        world_size: Number of replicas.
        schema: What the replicas have in common.
        unsynced: What belongs to the model and is not synced; see :mod:`._unsynced`.
    """
    return seal(
        "manifest",
        MANIFEST,
        {
            "run_id": run_id,
            "run": run,
            "world_size": world_size,
            "membership": "strict",
            "topology": "sharded",
            "settings": dict(schema.settings),
            "tensors": dict(schema.tensors),
            "fragments": [dict(fragment) for fragment in schema.fragments],
            "unsynced": dict(unsynced),
        },
    )


def read_manifest(data: bytes, origin: str) -> Mapping[str, Any]:
    """The fields of the manifest of a strict run.

    Raises:
        CorruptedObjectError: The manifest is damaged, or it is not that of a strict run.
        FormatError: Another version of diloco-core has written the record.
    """
    record = unseal("manifest", MANIFEST, data, origin)
    fields = Fields(record, origin)
    fields.text("membership", "strict")
    fields.text("run_id")
    fields.text("run", "[0-9a-f]{32}")
    fields.whole("world_size", 1, MOST_RANKS)
    fields.texts_by_name("settings")
    fields.texts_by_name("tensors")
    fields.parts("fragments")
    fields.part("unsynced")
    return record


def _ranks(pattern: re.Pattern[str], keys: Iterable[str]) -> Iterator[int]:
    for key in keys:
        match = pattern.fullmatch(key)
        if match is not None:
            yield int(match[1])
