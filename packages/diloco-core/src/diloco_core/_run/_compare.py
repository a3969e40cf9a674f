"""The check that a replica fits a run.

A run's settings and model are fixed when it begins: replicas that join or resume it must match.
"""

from __future__ import annotations

import re
from dataclasses import replace

from .._errors import MismatchError, RunExistsError
from .._exchange._base import Schema
from .._exchange._schemas import (
    MAY_CHANGE,
    NOT_GIVEN,
    compare_schemas,
    first_difference,
    only_another,
)
from ._records._manifest import Manifest
from ._settings import Joiner

# Only what is synced: a replica that comes back takes the values of the run. What is not synced
# must hold the same ones.
_VALUES = re.compile(r"( in fragment .*) with values [0-9a-f]+")
_WORDS = {"aggregate", "buffers", "clip", "codec", "flush", "init", "state_codec", "weight"}
# What DiLoCo takes by these names; whatever else begins with outer_ is set where the outer
# optimizer is made.
_OF_OUTER = {"outer_groups", "outer_lr", "outer_momentum", "outer_nesterov", "outer_optimizer"}
_OR_ELSE = (
    "or begin a new run on another prefix (export() writes the model of this run to a file, from "
    "which the new one can begin)"
)


def check_same_run(
    manifest: Manifest, schema: Schema, joiner: Joiner, *, uri: str, first: bool
) -> None:
    """Refuse to join a run with other settings, or with another model, than it was begun with.

    ``grace``, ``late``, timeouts and ``chunk_bytes`` may differ between replicas. ``first`` says
    whether this is the first incarnation of its rank, in fixed runs.

    Raises:
        RunExistsError: The run is of another launch, and this replica was not told to resume it.
        MismatchError: The message names the first difference, what the run has, what was given, and
            what to do.
        ConfigurationError: A setting has no effect in the run's topology.
    """
    rank, settings = joiner.rank, joiner.settings
    if manifest.run_id != joiner.run_id and not settings.resume:
        raise RunExistsError(
            f"{uri} belongs to run {manifest.run_id!r}, but this replica belongs to run "
            f"{joiner.run_id!r}. Give every run a prefix of its own, or pass resume=True to "
            "continue the run that is there."
        )
    settings.check_chosen(manifest.topology)
    membership = "fixed" if settings.fixed else "elastic"
    if manifest.membership != membership:
        advice = "pass min_replicas=" if settings.fixed else "leave min_replicas out"
        raise RunExistsError(
            f"{uri} holds a run with {manifest.membership} membership, which a replica with "
            f"{membership} membership cannot join: to join it, {advice}; to begin another run, use "
            "another prefix"
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
            raise _other_setting(uri, rank, name, repr(begun_with), repr(given))
    begun = Schema(manifest.tensors, manifest.settings)
    if settings.fixed:
        if first and not settings.resume:
            compare_schemas(f"rank {rank}", schema, f"rank {manifest.writer}", begun)
            _check_shards(uri, rank, schema, manifest)
            return
        may_change = MAY_CHANGE if settings.resume else {"committed"}
        kept = {name: manifest.settings[name] for name in may_change if name in manifest.settings}
        schema = replace(_without_values(schema), settings={**schema.settings, **kept})
        begun = _without_values(begun)
    _check_schema(uri, rank, schema, begun)
    begun_by = f"the run (begun by rank {manifest.writer})"
    compare_schemas(f"this replica (rank {rank})", schema, begun_by, begun)
    _check_shards(uri, rank, schema, manifest)


def _check_schema(uri: str, rank: int, schema: Schema, begun: Schema) -> None:
    """Refuse other settings or another model than a run was begun with, and say what to do."""
    difference = first_difference(schema, begun)
    if difference is not None and difference.kind == "setting":
        raise _other_setting(uri, rank, difference.name, difference.theirs, difference.mine)
    if difference is not None:
        what = f"another model than the one that rank {rank} has now"
        advice = "Build the same model, with the same tensors frozen"
        if other := only_another(difference):
            what, kept = f"other {other} than rank {rank} was given", other.removeprefix("outer_")
            advice = f"A run keeps its {kept}: pass those that it was begun with"
        raise MismatchError(
            f"the run at {uri} was begun with {what}. Tensor {difference.name!r} is "
            f"{difference.theirs} in the run, but {difference.mine} in this replica. {advice}, "
            f"{_OR_ELSE}."
        )


def _check_shards(uri: str, rank: int, schema: Schema, manifest: Manifest) -> None:
    """Refuse a run whose values are cut in another way: its files would count as damaged."""
    for mine, theirs in zip(schema.fragments, manifest.fragments, strict=False):
        if mine["shards"] != theirs["shards"]:
            raise MismatchError(
                f"the run at {uri} has fragment {mine['name']} in {theirs['shards']} shards, but "
                f"rank {rank} would cut it into {mine['shards']}, since the run was begun over "
                "another kind of store. Continue it over the same kind, on all ranks; or export "
                "the model, and begin another run."
            )


def _without_values(schema: Schema) -> Schema:
    tensors = {name: _VALUES.sub(r"\1", line) for name, line in schema.tensors.items()}
    return replace(schema, tensors=tensors)


def _other_setting(uri: str, rank: int, name: str, begun_with: str, given: str) -> MismatchError:
    """The error for a setting that is not as the run was begun with."""
    part = re.fullmatch(r"(outer_groups\[[0-9]+\])\.(.+)|outer_(.+)", name)
    if part and name not in _OF_OUTER:
        what, setting = part[1] or "an outer optimizer", part[2] or part[3]
        return MismatchError(
            f"the run at {uri} was begun with {what} whose {setting} is {begun_with}, but rank "
            f"{rank} was given one whose {setting} is {given}. A run keeps its outer optimizer: "
            f"make it as the run was begun with, {_OR_ELSE}."
        )
    name = name.replace("outer_nesterov", "nesterov")
    left_out = begun_with == NOT_GIVEN
    begun = f"without {name}" if left_out else f"with {name}={_as_typed(name, begun_with)}"
    own = f"no {name}" if given == NOT_GIVEN else f"{name}={_as_typed(name, given)}"
    advice = f"leave {name} out" if left_out else f"pass {name}={_as_typed(name, begun_with)}"
    if name == "outer_lr":
        advice += " (set_outer_lr() changes the rate once the run goes on)"
    return MismatchError(
        f"the run at {uri} was begun {begun}, but rank {rank} was given {own}. A run keeps the "
        f"settings that it was begun with: {advice}, {_OR_ELSE}."
    )


def _as_typed(name: str, value: str) -> str:
    """A setting as it stands in a program: words in quotation marks, numbers without."""
    return repr(value) if name in _WORDS else value
