"""Whether a replica fits a run, whose settings and model are fixed when it begins: replicas that join or resume it must match."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from .._errors import MismatchError, RunExistsError
from .._exchange._base import Schema
from .._exchange._begun_with import check_schema, other_setting
from .._exchange._schemas import MAY_CHANGE, compare_schemas

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ._records._manifest import Manifest
    from ._settings import Joiner

# Only what is synced: a replica that comes back takes the values of the run. What is not synced must hold the same ones.
_VALUES = re.compile(r"( in fragment .*) with values [0-9a-f]+")


def check_same_run(
    manifest: Manifest, schema: Schema, joiner: Joiner, *, uri: str, first: bool
) -> None:
    """Refuse to join a run with other settings, or with another model, than it was begun with.

    ``grace``, ``late``, timeouts and ``chunk_bytes`` may differ between replicas. ``first`` says whether this is the first
    life of its rank, in fixed runs.

    Raises:
        RunExistsError: The run belongs to another launch, and this replica was not told to resume it.
        MismatchError: The message names the first difference, what the run has, what was given, and what to do.
        ConfigurationError: A setting has no effect in the run's topology.
    """
    rank, settings = joiner.rank, joiner.settings
    if manifest.run_id != joiner.run_id and not settings.resume:
        raise RunExistsError(
            f"{uri} belongs to run {manifest.run_id!r}, but this replica belongs to run {joiner.run_id!r}. Give every run a "
            "prefix of its own, or pass resume=True to continue the run that is there."
        )
    settings.check_chosen(manifest.topology)
    membership = "fixed" if settings.fixed else "elastic"
    if manifest.membership != membership:
        advice = "pass min_replicas=" if settings.fixed else "leave min_replicas out"
        raise RunExistsError(
            f"{uri} holds a run with {manifest.membership} membership, which a replica with {membership} membership cannot join: "
            f"to join it, {advice}; to begin another run, use another prefix"
        )
    own_settings = {
        "world_size": joiner.world_size,
        "min_replicas": settings.min_replicas,
        "topology": manifest.topology if settings.topology == "auto" else settings.topology,
        "publish_every": settings.published_every,
        "retention": settings.retention,
    }
    for name, given in own_settings.items():
        begun_with = getattr(manifest, name)
        if given != begun_with:
            raise other_setting(uri, rank, name, repr(begun_with), repr(given))
    begun = Schema(manifest.tensors, manifest.settings)
    if settings.fixed:
        if first and not settings.resume:
            compare_schemas(f"rank {rank}", schema, f"rank {manifest.writer}", begun)
            _check_shards(uri, rank, schema, manifest)
            return
        may_change = MAY_CHANGE if settings.resume else {"committed"}
        kept = {name: manifest.settings[name] for name in may_change if name in manifest.settings}
        schema = replace(
            schema,
            tensors=_without_values(schema.tensors),
            settings={**schema.settings, **kept},
        )
        begun = replace(begun, tensors=_without_values(begun.tensors))
    check_schema(uri, rank, schema, begun, f"the run (begun by rank {manifest.writer})")
    _check_shards(uri, rank, schema, manifest)


def _check_shards(uri: str, rank: int, schema: Schema, manifest: Manifest) -> None:
    """Refuse a run whose values are cut in another way: its files would count as damaged."""
    for mine, theirs in zip(schema.fragments, manifest.fragments, strict=False):
        if mine["shards"] != theirs["shards"]:
            raise MismatchError(
                f"the run at {uri} has fragment {mine['name']} in {theirs['shards']} shards, but rank {rank} would cut it into "
                f"{mine['shards']}. That is so if the run was begun over another kind of store, since shards in a folder may be "
                "larger. Continue it over the same kind of store, on all ranks; or export the model, and begin another run."
            )


def _without_values(tensors: Mapping[str, str]) -> dict[str, str]:
    return {name: _VALUES.sub(r"\1", line) for name, line in tensors.items()}
