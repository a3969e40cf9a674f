"""How a strict run begins: the replicas meet, and rank 0 writes down what the run is."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .._errors import RendezvousTimeoutError, ReplicaLostError
from .._exchange._endings import named_ranks
from .._store._parallel import in_parallel
from .._timing import Wait
from ._claims import READS_AT_ONCE, check_own, read_claim
from ._compare import compare
from ._participant import Participant
from ._records._manifest import Manifest
from ._records._records import claimed, run_name
from ._watch import Watch, write_manifest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._exchange._base import Schema
    from .._store._patient import Patient
    from .._timing import Timing
    from ._liveness import Liveness
    from ._records._records import Claim

#: What to look at while ranks are missing: before a rank has claimed its place, nothing in the store tells of it.
ABSENT = (
    "A rank that is missing is still starting, or it failed before it could leave word in the store, for instance because "
    "DiLoCo(...) refused an argument: look at its log"
)


def begin_run(
    store: Patient, own_claim: Claim, schema: Schema, timing: Timing, liveness: Liveness
) -> tuple[Participant, Watch | None]:
    """Meet the other replicas. Rank 0 then stores what is not synced, and the manifest.

    Args:
        store: The run's prefix.
        own_claim: The claim of this process, which is in the store.
        schema: What all replicas must have in common.
        timing: Limits and clock.
        liveness: Is told of the other processes.

    Returns:
        This replica in the run; and for rank 0, what watches over the objects that it has stored.

    Raises:
        RunExistsError: Another process holds the rank, or another run uses the prefix, too.
        CorruptedObjectError: A claim is damaged.
        FormatError: A replica runs another version of diloco-core.
        RendezvousTimeoutError: Some ranks did not arrive in time; the error names them.
        ReplicaLostError: A replica failed before all had met.
        MismatchError: The replicas disagree; the error says on what.
    """
    claims = _meet(store, own_claim, schema, timing, liveness)
    watch = _write_down(store, claims, schema, timing) if own_claim.rank == 0 else None
    return Participant.of(claims, own_claim, store, timing, liveness), watch


def _meet(
    store: Patient,
    own_claim: Claim,
    schema: Schema,
    timing: Timing,
    liveness: Liveness,
) -> list[Claim]:
    """Wait for all other ranks, and check that they agree with this one. Returns the claims of all in rank order."""
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
                liveness.know(other)

    def look_around() -> None:
        try:
            liveness.check_failures()
        except ReplicaLostError:
            read_claims()  # if it failed because the replicas disagree, the error should say that
            raise

    def expired() -> Exception:
        return RendezvousTimeoutError(
            f"only {len(claims)} of {own_claim.world_size} replicas met at {store.uri} within {timing.join_timeout:g} s; "
            f"missing: {named_ranks(missing())}. {ABSENT}, and check that it was given the same URI and world size. If "
            "the ranks only need longer to start, raise join_timeout.",
            missing(),
        )

    def notice(seconds: float) -> str:
        return (
            f"rank {own_claim.rank}: {len(claims)} of {own_claim.world_size} replicas have met at {store.uri} after "
            f"{seconds:.0f} s; waiting for {named_ranks(missing())}, for up to {timing.join_timeout:g} s. {ABSENT}."
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


def _write_down(store: Patient, claims: Sequence[Claim], schema: Schema, timing: Timing) -> Watch:
    unsynced = {} if schema.unsynced is None else schema.unsynced.publish(store.put)
    manifest = Manifest(
        claims[0].run_id,
        run_name(claims),
        len(claims),
        schema.settings,
        schema.tensors,
        schema.fragments,
        unsynced,
        [(claim.life, claim.nonce) for claim in claims],
    )
    write_manifest(store, manifest, claims[0], timing)
    return Watch(store, timing, claims[0], manifest, schema.unsynced)
