"""How the replicas of a strict run meet: every rank claims its place once, then all check that they agree."""

from __future__ import annotations

import os
import re
import socket
from functools import partial
from typing import TYPE_CHECKING

from .._errors import (
    CorruptedObjectError,
    MismatchError,
    RendezvousTimeoutError,
    ReplicaLostError,
    RunExistsError,
)
from .._exchange._schemas import compare_schemas
from .._store._parallel import in_parallel
from .._store._reread import read_again
from .._timing import Wait
from ._records import (
    MANIFEST,
    Claim,
    claim_key,
    claimed_ranks,
    read_schema,
    run_name,
    schema_digest,
    schema_key,
    schema_record,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from .._exchange._base import Schema
    from .._store._patient import Patient
    from .._timing import Timing

_ELASTIC_CLAIM = re.compile(r"claims/[0-9]{5}/[0-9]+\.json")
_COMMIT = re.compile(r"commits/[0-9]{8}\.json")
READS_AT_ONCE = 16
_OWN_PREFIX = "Give every run a prefix of its own"


def claim(
    store: Patient,
    rank: int,
    world_size: int,
    run_id: str,
    nonce: str,
    schema: Schema,
    chunk_bytes: int,
    timing: Timing,
) -> Claim:
    """Take a rank's place in the run, once and for all.

    Args:
        store: The run's prefix.
        rank: This replica.
        world_size: How many there are.
        run_id: The launch they belong to, or "".
        nonce: Tells this process from others that claim the rank.
        schema: What they must have in common.
        chunk_bytes: For how many bytes of a contribution there is a checksum.
        timing: Its ``sleep`` is used.

    Raises:
        RunExistsError: The rank has been claimed before, or the prefix holds another run.
    """
    own = Claim(
        rank,
        world_size,
        run_id,
        chunk_bytes,
        schema_digest(schema),
        nonce=nonce,
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    claims = store.list("claims/")
    if any(map(_ELASTIC_CLAIM.fullmatch, claims)):
        raise RunExistsError(
            f"{store.uri} holds an elastic run, which no strict replica can join: pass min_replicas=, or use another prefix"
        )
    if claim_key(rank) not in claims:
        # No replica of a run writes these before all ranks are claimed.
        for key in (MANIFEST, *filter(_COMMIT.fullmatch, store.list("commits/"))):
            if store.get(key) is not None:
                raise RunExistsError(f"{store.uri} holds {key!r} of an earlier run. {_OWN_PREFIX}.")
    table = schema_record(schema)
    store.put(schema_key(own.schema), lambda: [table])
    if not store.create(claim_key(rank), own.to_bytes):
        check_own(store, own, timing)
    return own


def meet(
    store: Patient,
    own: Claim,
    schema: Schema,
    timing: Timing,
    check_failures: Callable[[], object],
    came: Callable[[Claim], object] = lambda _: None,
) -> str:
    """Wait for all other ranks, and compare; returns the name of the run that they are.

    Args:
        store: The run's prefix.
        own: What :func:`claim` returned.
        schema: What they must have in common.
        timing: Limits and clock.
        check_failures: Raises if another rank has failed already.
        came: Told the claim of everybody who comes.

    Raises:
        RunExistsError: The rank is claimed by somebody else, or the prefix is used by another run too.
        RendezvousTimeoutError: Some ranks did not come; it names them.
        MismatchError: The replicas disagree; it says on what.
        CorruptedObjectError: A claim is damaged.
        FormatError: A replica runs another version of diloco-core.
    """
    claims: dict[int, Claim] = {own.rank: own}

    def missing() -> list[int]:
        return [rank for rank in range(own.world_size) if rank not in claims]

    def read_claims() -> None:
        come = [rank for rank in claimed_ranks(store.list("claims/")) if rank not in claims]
        for other in in_parallel(
            store.store, (partial(_read, store, rank, timing) for rank in come), READS_AT_ONCE
        ):
            if other is not None:
                _compare(own, other, store.uri)
                if other.schema != own.schema:
                    _compare_tables(store, own, schema, other, timing)
                claims[other.rank] = other
                came(other)

    def look_around() -> None:
        try:
            check_failures()
        except ReplicaLostError:
            read_claims()  # if it failed because we disagree, that is what should be said
            raise

    def expired() -> Exception:
        ranks = ", ".join(map(str, missing()))
        return RendezvousTimeoutError(
            f"{len(claims)} of {own.world_size} replicas met at {store.uri} within {timing.join_timeout:g} s; "
            f"missing: rank {ranks}. Look at the logs of the missing ranks, and whether they were given the same URI "
            "and world size.",
            missing(),
        )

    def notice(seconds: float) -> str:
        ranks = ", ".join(map(str, missing()))
        return (
            f"rank {own.rank}: {len(claims)} of {own.world_size} replicas have met at {store.uri} after {seconds:.0f} s; waiting "
            f"for rank {ranks}, for up to {timing.join_timeout:g} s"
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
    # A store without exclusive creation may have let somebody else overwrite the claim.
    check_own(store, own, timing)
    return run_name(claims.values())


def _read(store: Patient, rank: int, timing: Timing) -> Claim | None:
    key = claim_key(rank)

    def read() -> Claim | None:
        data = store.get(key)
        return None if data is None else Claim.from_bytes(data, rank, f"{store.uri}/{key}")

    return read_again(timing, read)


def check_own(store: Patient, own: Claim, timing: Timing) -> None:
    """Refuse to begin where the own rank's claim is somebody else's.

    Raises:
        RunExistsError: It is, or there is none any more.
        CorruptedObjectError: It is damaged.
    """
    other = _read(store, own.rank, timing)
    if other is None:
        raise RunExistsError(
            f"the claim of rank {own.rank} in {store.uri} has vanished: something deletes objects there. {_OWN_PREFIX}."
        )
    _refuse_another(store, own, other)


def watch_own(store: Patient, own: Claim, timing: Timing) -> None:
    """Refuse to go on where another run has claimed the own rank: the prefix was emptied, and is used again.

    A claim that is gone or damaged ends no run: what has met needs it no more.

    Raises:
        RunExistsError: Another run has.
    """
    try:
        other = _read(store, own.rank, timing)
    except CorruptedObjectError:
        return
    if other is not None:
        _refuse_another(store, own, other)


def _refuse_another(store: Patient, own: Claim, other: Claim) -> None:
    if other.nonce == own.nonce:
        return
    same = bool(own.run_id) and other.run_id == own.run_id
    holder = (
        f"run {other.run_id!r}"
        if other.run_id
        else "an earlier run, or by an earlier process of this one"
    )
    if same:
        holder = "an earlier process of this rank in the same run"
    raise RunExistsError(
        f"rank {own.rank} of {store.uri} is taken by {holder}: process {other.pid} on {other.host}. In a strict run every rank "
        "takes part only once. If the others of that run still wait for this rank, end them, and start all replicas again on a "
        "fresh prefix, from a checkpoint (pass min_replicas= for runs in which a replica can come back). "
        f"{_OWN_PREFIX}."
    )


def _compare(own: Claim, other: Claim, uri: str) -> None:
    if other.run_id != own.run_id:
        raise RunExistsError(
            f"{uri} is used by two runs: rank {other.rank} belongs to run {other.run_id!r}, this replica to {own.run_id!r}. "
            f"{_OWN_PREFIX}."
        )
    for name, mine, theirs in (
        ("world_size", own.world_size, other.world_size),
        ("chunk_bytes", own.chunk_bytes, other.chunk_bytes),
    ):
        if mine != theirs:
            raise MismatchError(
                f"rank {other.rank} was started with {name}={theirs}, and rank {own.rank} with {name}={mine}: "
                "all replicas of a run must be given the same"
            )


def _compare_tables(
    store: Patient, own: Claim, schema: Schema, other: Claim, timing: Timing
) -> None:
    """Say in what two replicas differ whose digests do."""
    key = schema_key(other.schema)

    def read() -> Schema:
        data = store.get(key)
        if data is None:
            raise CorruptedObjectError(f"{store.uri}/{key} is gone")
        return read_schema(data, other.schema, f"{store.uri}/{key}")

    try:
        theirs = read_again(timing, read)
    except CorruptedObjectError as error:
        raise MismatchError(
            f"rank {own.rank} and rank {other.rank} differ in their tensors or settings; in which ones cannot be told: {error}"
        ) from error
    compare_schemas(f"rank {own.rank}", schema, f"rank {other.rank}", theirs)
