"""Which process holds a rank of a strict run: each claims its rank once, and stops when another one has claimed it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .._errors import CorruptedObjectError, RunExistsError
from .._store._reread import read_again
from ._records._manifest import MANIFEST, lives_listed, manifest_keys
from ._records._records import Claim, claim_key, schema_digest, schema_key, schema_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .._exchange._base import Schema
    from .._store._patient import Patient
    from .._timing import Timing

_ELASTIC_CLAIM = re.compile(r"claims/[0-9]{5}/[0-9]+\.json")
# The keys of commit records of elastic runs, and of strict runs of earlier versions, do not name the run.
_COMMIT = re.compile(r"commits/[0-9]{8}(\.[0-9a-f]{16})?\.json")
_SHARD = re.compile(r"state/[0-9]{8}/[0-9]{5}\.[0-9a-f]{16}\.safetensors")
READS_AT_ONCE = 16
OWN_PREFIX = "Give every run a prefix of its own"


def claim(store: Patient, own_claim: Claim, schema: Schema, timing: Timing) -> None:
    """Claim a rank of the run for this process. A rank can be claimed only once.

    Args:
        store: The run's prefix.
        own_claim: The claim of this process.
        schema: What all replicas must have in common.
        timing: Its ``sleep`` is used before a claim is read again.

    Raises:
        RunExistsError: The rank has been claimed before, or the prefix holds another run.
    """
    claims = store.list("claims/")
    refuse_elastic(store.uri, claims)
    key_of_claim = claim_key(own_claim.rank)
    if key_of_claim not in claims:
        _refuse_used(store)
    write_table(store, schema)
    if not store.create(key_of_claim, own_claim.to_bytes):
        check_own(store, own_claim, timing)


def _refuse_used(store: Patient) -> None:
    """Refuse a prefix with objects of an earlier run: a run that is resumed would take them for its own.

    This run cannot have written any of them yet, since that comes after all ranks are claimed.
    """

    def left() -> Iterator[str]:
        yield MANIFEST
        yield from filter(_COMMIT.fullmatch, store.list("commits/"))
        for life in lives_listed(store.list("manifests/")):
            yield from reversed(manifest_keys(life))
        yield from filter(_SHARD.fullmatch, store.list("state/"))

    for key in left():
        # A listing may be older than the emptying of the prefix.
        if store.read(key, lambda _: True):
            raise RunExistsError(
                f"{store.uri} holds {key!r} of an earlier run. {OWN_PREFIX}, or delete everything under this one first. If this "
                "was to continue that run, pass resume=True."
            )


def write_table(store: Patient, schema: Schema) -> None:
    """Store the table of tensors and settings that a claim refers to."""
    table = schema_record(schema)
    store.put(schema_key(schema_digest(schema)), lambda: [table])


def refuse_elastic(uri: str, claims: Iterable[str]) -> None:
    """Refuse a prefix with claims of an elastic run.

    Raises:
        RunExistsError: There is one.
    """
    if any(map(_ELASTIC_CLAIM.fullmatch, claims)):
        raise RunExistsError(
            f"{uri} holds an elastic run, which a strict replica cannot join: to join it, pass min_replicas=; to begin a "
            "strict run, use another prefix"
        )


def read_claim(store: Patient, rank: int, timing: Timing, life: int = 1) -> Claim | None:
    """The stored claim of a rank by one of its lives; None if there is none.

    Raises:
        CorruptedObjectError: The claim is damaged.
        FormatError: A replica runs another version of diloco-core.
    """
    key = claim_key(rank, life)

    def read() -> Claim | None:
        data = store.get(key)
        return None if data is None else Claim.from_bytes(data, rank, f"{store.uri}/{key}", life)

    return read_again(timing, read)


def check_own(store: Patient, own_claim: Claim, timing: Timing) -> None:
    """Check that the stored claim of this replica's rank is its own.

    Raises:
        RunExistsError: The claim is that of another process, or it is gone.
        CorruptedObjectError: The claim is damaged.
    """
    stored = read_claim(store, own_claim.rank, timing, own_claim.life)
    if stored is None:
        raise RunExistsError(
            f"the claim of rank {own_claim.rank} in {store.uri} has vanished: something deletes objects there. {OWN_PREFIX}."
        )
    _refuse_another(store, own_claim, stored)


def watch_own(store: Patient, own_claim: Claim, timing: Timing) -> None:
    """Refuse to go on if another run has claimed this replica's rank, since the prefix was emptied and is used again.

    A claim that is gone or damaged does not end the run: after the replicas have met, they no longer need it.

    Raises:
        RunExistsError: Another run has claimed the rank.
    """
    try:
        stored = read_claim(store, own_claim.rank, timing, own_claim.life)
    except CorruptedObjectError:
        return
    if stored is not None:
        _refuse_another(store, own_claim, stored)


def check_not_resumed(store: Patient, own_claim: Claim) -> None:
    """Refuse to go on if a later process has resumed the run in the place of this one.

    Called before anything is published, and before anything is deleted that others may need. This costs one small request.

    Raises:
        RunExistsError: A later process has claimed the rank.
    """
    if store.peek(claim_key(own_claim.rank, own_claim.life + 1)) is not None:
        raise RunExistsError(
            f"rank {own_claim.rank} of {store.uri} has been taken over by a later process, which has resumed the run with "
            "resume=True because this process had ended or had shown no sign of life for a long time. This process stops. What "
            "it has not published is lost."
        )


def _refuse_another(store: Patient, own_claim: Claim, stored: Claim) -> None:
    if stored.nonce == own_claim.nonce:
        return
    same_run = bool(own_claim.run_id) and stored.run_id == own_claim.run_id
    holder = (
        f"run {stored.run_id!r}"
        if stored.run_id
        else "an earlier run, or by an earlier process of this one"
    )
    if same_run:
        holder = "an earlier process of this rank in the same run"
    raise RunExistsError(
        f"rank {own_claim.rank} of {store.uri} is taken by {holder}: process {stored.pid} on {stored.host}. To continue that run "
        "after all of its processes have ended, start all ranks again with resume=True (for runs in which a single replica can "
        f"come back, pass min_replicas=). {OWN_PREFIX}."
    )
