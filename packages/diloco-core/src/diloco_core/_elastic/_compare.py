"""Whether a replica fits a run, whose settings and model are fixed when it begins: replicas that join or resume it must match."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._errors import RunExistsError
from .._exchange._base import Schema
from .._exchange._begun_with import check_schema, other_setting

if TYPE_CHECKING:
    from ._records._manifest import Manifest
    from ._settings import Elastic


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
        ConfigurationError: A setting has no effect in the run's topology.
    """
    if manifest.run_id != run_id and not settings.resume:
        raise RunExistsError(
            f"{uri} belongs to run {manifest.run_id!r}, but this replica belongs to run {run_id!r}. Give every run a prefix of "
            "its own, or pass resume=True to continue the run that is there."
        )
    if settings.topology == "auto":
        settings.check_published(manifest.topology)
    own_settings = {
        "world_size": world_size,
        "min_replicas": settings.min_replicas,
        "topology": manifest.topology if settings.topology == "auto" else settings.topology,
        "publish_every": settings.published_every,
        "retention": settings.retention,
    }
    for name, given in own_settings.items():
        begun_with = getattr(manifest, name)
        if given != begun_with:
            raise other_setting(uri, rank, name, repr(begun_with), repr(given))
    run = f"the run (begun by rank {manifest.writer})"
    check_schema(uri, rank, schema, Schema(manifest.tensors, manifest.settings), run)
