"""Whether a replica fits a run that it joins or continues: what a run was begun with stays the same."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .._errors import MismatchError
from ._schemas import (
    NOT_GIVEN,
    compare_schemas,
    first_difference,
    only_another_fragment,
    only_another_group,
)

if TYPE_CHECKING:
    from ._base import Schema

_WORDS = {"aggregate", "buffers", "clip", "codec", "flush", "init", "state_codec", "weight"}
# What DiLoCo takes by these names; whatever else begins with outer_ is set where the outer optimizer is made.
_OF_OUTER = {"outer_groups", "outer_lr", "outer_momentum", "outer_nesterov", "outer_optimizer"}
OR_ELSE = (
    "or begin a new run on another prefix (export() writes the model of this run to a file, from which the new one can "
    "begin)"
)


def check_schema(uri: str, rank: int, schema: Schema, run_schema: Schema, run: str) -> None:
    """Refuse a replica with other settings, or with another model, than its run was begun with.

    Args:
        uri: Where the run is.
        rank: The rank of this replica.
        schema: The tensors and settings of this replica.
        run_schema: Those of the run.
        run: What errors call the run.

    Raises:
        MismatchError: The message names the first difference, what the run has, what was given, and what to do.
    """
    difference = first_difference(schema, run_schema)
    if difference is not None and difference.kind == "setting":
        raise other_setting(uri, rank, difference.name, difference.theirs, difference.mine)
    if difference is not None and only_another_fragment(difference):
        raise MismatchError(
            f"the run at {uri} was begun with other fragments than those that rank {rank} was given. Tensor {difference.name!r} "
            f"is {difference.theirs} in the run, but {difference.mine} in this replica. A run keeps its fragments: pass those "
            f"that it was begun with, {OR_ELSE}."
        )
    if difference is not None and only_another_group(difference):
        raise MismatchError(
            f"the run at {uri} was begun with other outer_groups than those that rank {rank} was given. Tensor "
            f"{difference.name!r} is {difference.theirs} in the run, but {difference.mine} in this replica. A run keeps its "
            f"groups: pass those that it was begun with, {OR_ELSE}."
        )
    if difference is not None:
        raise MismatchError(
            f"the run at {uri} was begun with another model than the one that rank {rank} has now. Tensor {difference.name!r} is "
            f"{difference.theirs} in the run, but {difference.mine} in this replica. Build the same model, with the same tensors "
            f"frozen, {OR_ELSE}."
        )
    compare_schemas(f"this replica (rank {rank})", schema, run, run_schema)


def other_setting(uri: str, rank: int, name: str, begun_with: str, given: str) -> MismatchError:
    """The error for a setting that is not as the run was begun with."""
    part = re.fullmatch(r"(outer_groups\[[0-9]+\])\.(.+)|outer_(.+)", name)
    if part and name not in _OF_OUTER:
        what, setting = part[1] or "an outer optimizer", part[2] or part[3]
        return MismatchError(
            f"the run at {uri} was begun with {what} whose {setting} is {begun_with}, but rank {rank} was given one whose "
            f"{setting} is {given}. A run keeps its outer optimizer: make it as the run was begun with, {OR_ELSE}."
        )
    name = name.replace("outer_nesterov", "nesterov")
    left_out = begun_with == NOT_GIVEN
    begun = f"without {name}" if left_out else f"with {name}={_as_typed(name, begun_with)}"
    own = f"no {name}" if given == NOT_GIVEN else f"{name}={_as_typed(name, given)}"
    advice = f"leave {name} out" if left_out else f"pass {name}={_as_typed(name, begun_with)}"
    if name == "outer_lr":
        advice += " (set_outer_lr() changes the rate once the run goes on)"
    return MismatchError(
        f"the run at {uri} was begun {begun}, but rank {rank} was given {own}. A run keeps the settings that it was begun with: "
        f"{advice}, {OR_ELSE}."
    )


def _as_typed(name: str, value: str) -> str:
    """A setting as it stands in a program: words in quotation marks, numbers without."""
    return repr(value) if name in _WORDS else value
