"""Whether a replica fits a run, whose settings and model are fixed when it begins: replicas that join or resume it must match."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._errors import MismatchError, RunExistsError
from .._exchange._base import Schema
from .._exchange._schemas import compare_schemas, first_difference

if TYPE_CHECKING:
    from ._log._records import Manifest
    from ._settings import Elastic

_ELSE = "or begin a new run on another prefix (export() writes the model of this run to a file, from which the new one can begin)"


def check_same_run(
    manifest: Manifest,
    schema: Schema,
    *,
    rank: int,
    world_size: int,
    run_id: str,
    settings: Elastic,
    uri: str,
) -> None:
    """Refuse to join a run with other settings, or with another model, than it was begun with.

    ``grace``, ``late``, timeouts and ``chunk_bytes`` may differ between replicas.

    Raises:
        RunExistsError: The run belongs to another launch, and this replica was not told to resume it.
        MismatchError: The message names the first difference, what the run has, what was given, and what to do.
    """
    if manifest.run_id != run_id and not settings.resume:
        raise RunExistsError(
            f"{uri} belongs to run {manifest.run_id!r}, but this replica belongs to run {run_id!r}. Give every run a prefix of "
            "its own, or pass resume=True to continue the run that is there."
        )
    own_settings = {
        "world_size": world_size,
        "min_replicas": settings.min_replicas,
        "topology": manifest.topology if settings.topology == "auto" else settings.topology,
        "publish_every": settings.publish_every,
        "retention": settings.retention,
    }
    for name, given in own_settings.items():
        begun_with = getattr(manifest, name)
        if given != begun_with:
            raise _differs(uri, rank, name, repr(begun_with), repr(given))
    run_schema = Schema(manifest.tensors, manifest.settings)
    difference = first_difference(schema, run_schema)
    if difference is not None and difference.kind == "setting":
        raise _differs(uri, rank, difference.name, difference.theirs, difference.mine)
    if difference is not None:
        raise MismatchError(
            f"the run at {uri} was begun with another model than the one that rank {rank} has now. Tensor {difference.name!r} is "
            f"{difference.theirs} in the run, but {difference.mine} in this replica. Build the same model, with the same tensors "
            f"frozen, {_ELSE}."
        )
    compare_schemas(
        f"this replica (rank {rank})",
        schema,
        f"the run (begun by rank {manifest.writer})",
        run_schema,
    )


def _differs(uri: str, rank: int, name: str, begun_with: str, given: str) -> MismatchError:
    return MismatchError(
        f"the run at {uri} was begun with {name}={begun_with}, but rank {rank} was given {name}={given}. A run keeps the "
        f"settings that it was begun with: pass {name}={begun_with}, {_ELSE}."
    )
