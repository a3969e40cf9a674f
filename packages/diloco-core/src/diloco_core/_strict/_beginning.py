"""How a strict run begins: the replicas meet, and rank 0 writes down what the run is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._model._unsynced_watch import UnsyncedWatch
from ._manifest import MANIFEST, Manifest
from ._participant import Participant
from ._records import run_name
from ._rendezvous import meet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._exchange._base import Schema
    from .._store._patient import Patient
    from .._timing import Timing
    from ._liveness import Liveness
    from ._records import Claim


def begin_run(
    store: Patient, own_claim: Claim, schema: Schema, timing: Timing, liveness: Liveness
) -> tuple[Participant, UnsyncedWatch | None]:
    """Meet the other replicas. Rank 0 then stores what is not synced, and the manifest.

    Args:
        store: The run's prefix.
        own_claim: The claim of this process, which is in the store.
        schema: What all replicas must have in common.
        timing: Limits and clock.
        liveness: Is told of the other processes.

    Returns:
        This replica in the run; and for rank 0, what watches over the objects that are not synced.

    Raises:
        RunExistsError: Another process holds the rank, or another run uses the prefix, too.
        RendezvousTimeoutError: Some ranks did not arrive in time; the error names them.
        ReplicaLostError: A replica failed before all had met.
        MismatchError: The replicas disagree; the error says on what.
    """
    claims = meet(
        store,
        own_claim,
        schema,
        timing,
        liveness.check_failures,
        lambda other: liveness.know(other.rank, other.nonce),
    )
    watch = _write_down(store, claims, schema, timing) if own_claim.rank == 0 else None
    return Participant.of(claims, own_claim, store, timing, liveness), watch


def _write_down(
    store: Patient, claims: Sequence[Claim], schema: Schema, timing: Timing
) -> UnsyncedWatch:
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
    store.put(MANIFEST, lambda: [manifest.to_bytes()])
    return UnsyncedWatch(store, timing, 0, unsynced, schema.unsynced)
