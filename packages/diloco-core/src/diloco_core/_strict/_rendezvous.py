"""How the replicas of a strict run meet: each claims its rank once, then all check that they agree."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from .._errors import (
    CorruptedObjectError,
    MismatchError,
    RendezvousTimeoutError,
    ReplicaLostError,
    RunExistsError,
)
from .._exchange._endings import named_ranks
from .._exchange._schemas import compare_schemas
from .._store._parallel import in_parallel
from .._store._reread import read_again
from .._timing import Wait
from ._manifest import MANIFEST
from ._records import (
    Claim,
    claim_key,
    claimed,
    read_schema,
    schema_digest,
    schema_key,
    schema_record,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .._exchange._base import Schema
    from .._store._patient import Patient
    from .._timing import Timing

_ELASTIC_CLAIM = re.compile(r"claims/[0-9]{5}/[0-9]+\.json")
_COMMIT = re.compile(r"commits/[0-9]{8}(\.[0-9a-f]{16})?\.json")
READS_AT_ONCE = 16
_OWN_PREFIX = "Give every run a prefix of its own"


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
        # This run cannot have written these objects yet, since that comes after all ranks are claimed.
        for key in (MANIFEST, *filter(_COMMIT.fullmatch, store.list("commits/"))):
            if store.get(key) is not None:
                raise RunExistsError(f"{store.uri} holds {key!r} of an earlier run. {_OWN_PREFIX}.")
    write_table(store, schema)
    if not store.create(key_of_claim, own_claim.to_bytes):
        check_own(store, own_claim, timing)


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


def meet(
    store: Patient,
    own_claim: Claim,
    schema: Schema,
    timing: Timing,
    check_failures: Callable[[], object],
    joined: Callable[[Claim], object] = lambda _: None,
) -> list[Claim]:
    """Wait for all other ranks, and check that they agree with this one. Returns the claims of all in rank order.

    Args:
        store: The run's prefix.
        own_claim: The claim of this process; see :func:`claim`.
        schema: What all replicas must have in common.
        timing: Limits and clock.
        check_failures: Raises an error if another rank has failed already.
        joined: Called with the claim of each other rank when that has arrived.

    Raises:
        RunExistsError: Another process holds the rank, or another run uses the prefix, too.
        RendezvousTimeoutError: Some ranks did not arrive in time; the error names them.
        MismatchError: The replicas disagree; the error says on what.
        CorruptedObjectError: A claim is damaged.
        FormatError: A replica runs another version of diloco-core.
    """
    claims: dict[int, Claim] = {own_claim.rank: own_claim}

    def missing() -> list[int]:
        return [rank for rank in range(own_claim.world_size) if rank not in claims]

    def read_claims() -> None:
        arrived = claimed(store.list("claims/"))
        new_ranks = sorted(rank for rank, life in arrived if life == 1 and rank not in claims)
        for other in in_parallel(
            store.store,
            (partial(read_claim, store, rank, timing) for rank in new_ranks),
            READS_AT_ONCE,
        ):
            if other is not None:
                compare(store, own_claim, schema, other, timing)
                claims[other.rank] = other
                joined(other)

    def look_around() -> None:
        try:
            check_failures()
        except ReplicaLostError:
            read_claims()  # if it failed because the replicas disagree, the error should say that
            raise

    def expired() -> Exception:
        return RendezvousTimeoutError(
            f"only {len(claims)} of {own_claim.world_size} replicas met at {store.uri} within {timing.join_timeout:g} s; "
            f"missing: {named_ranks(missing())}. Look at the logs of the missing ranks, and check that they were given the "
            "same URI and world size. If they only need longer to start, raise join_timeout.",
            missing(),
        )

    def notice(seconds: float) -> str:
        return (
            f"rank {own_claim.rank}: {len(claims)} of {own_claim.world_size} replicas have met at {store.uri} after "
            f"{seconds:.0f} s; waiting for {named_ranks(missing())}, for up to {timing.join_timeout:g} s"
        )

    wait = Wait(
        timing,
        store.near,
        timing.join_timeout,
        look_around,
        expired,
        downtime=lambda: store.downtime,
        notice=notice,
    )
    read_claims()
    while missing():
        wait.pause()
        read_claims()
    # A store without exclusive creation may have let another process overwrite the claim.
    check_own(store, own_claim, timing)
    return [claim for _, claim in sorted(claims.items())]


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
            f"the claim of rank {own_claim.rank} in {store.uri} has vanished: something deletes objects there. {_OWN_PREFIX}."
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
    key = claim_key(own_claim.rank, own_claim.life + 1)
    try:
        resumed = store.get(key) is not None
    except CorruptedObjectError:  # too large for a record, but it is there
        resumed = True
    if resumed:
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
        f"come back, pass min_replicas=). {_OWN_PREFIX}."
    )


def compare(store: Patient, own_claim: Claim, schema: Schema, other: Claim, timing: Timing) -> None:
    """Check that another replica belongs to the same launch, and has the same settings and tensors.

    Raises:
        RunExistsError: It belongs to another launch.
        MismatchError: It has other settings or tensors; the error says which.
    """
    _compare(own_claim, other, store.uri)
    if other.schema != own_claim.schema:
        _compare_tables(store, own_claim, schema, other, timing)


def _compare(own_claim: Claim, other: Claim, uri: str) -> None:
    if other.run_id != own_claim.run_id:
        raise RunExistsError(
            f"{uri} is used by two runs: rank {other.rank} belongs to run {other.run_id!r}, and this replica (rank "
            f"{own_claim.rank}) to {own_claim.run_id!r}. {_OWN_PREFIX}."
        )
    for name, own_value, other_value in (
        ("world_size", own_claim.world_size, other.world_size),
        ("chunk_bytes", own_claim.chunk_bytes, other.chunk_bytes),
    ):
        if own_value != other_value:
            raise MismatchError(
                f"rank {other.rank} was started with {name}={other_value}, and rank {own_claim.rank} with {name}={own_value}: "
                "start all replicas of a run with the same value"
            )


def _compare_tables(
    store: Patient, own_claim: Claim, schema: Schema, other: Claim, timing: Timing
) -> None:
    """Raise the error that says in what two replicas with different digests differ."""
    key = schema_key(other.schema)

    def read() -> Schema:
        data = store.get(key)
        if data is None:
            raise CorruptedObjectError(f"{store.uri}/{key} is gone")
        return read_schema(data, other.schema, f"{store.uri}/{key}")

    try:
        other_schema = read_again(timing, read)
    except CorruptedObjectError as error:
        raise MismatchError(
            f"rank {own_claim.rank} and rank {other.rank} differ in their tensors or settings. Which ones cannot be said, since "
            f"the table of rank {other.rank} cannot be read ({error}): start all replicas with the same model and settings"
        ) from error
    compare_schemas(f"rank {own_claim.rank}", schema, f"rank {other.rank}", other_schema)
