"""Whether the replicas of a strict run agree: the same launch, the same settings, the same tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._errors import CorruptedObjectError, MismatchError, RunExistsError
from .._exchange._schemas import compare_schemas
from .._store._reread import read_again
from ._claims import OWN_PREFIX
from ._records._records import read_schema, schema_key

if TYPE_CHECKING:
    from .._exchange._base import Schema
    from .._store._patient import Patient
    from .._timing import Timing
    from ._records._records import Claim


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
            f"{own_claim.rank}) to {own_claim.run_id!r}. {OWN_PREFIX}."
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
