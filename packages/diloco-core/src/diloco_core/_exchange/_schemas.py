"""Comparing the schemas of two replicas, and saying in what they differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from .._errors import MismatchError
from ._base import Schema

MAY_CHANGE = frozenset({"sync_every", "init", "flush", "committed"})
"""The settings that may differ when a fixed run continues, if they are the same on all replicas."""


def compare_schemas(name: str, mine: Schema, other_name: str, theirs: Schema) -> None:
    """Refuse replicas with different schemas.

    Args:
        name: What errors call this replica.
        mine: The schema of this replica.
        other_name: What errors call the other replica, or the run.
        theirs: The schema of the other replica or of the run.

    Raises:
        MismatchError: The schemas differ. The error names the first setting or tensor that differs,
            and both values.
    """
    difference = first_difference(mine, theirs)
    if difference is not None:
        raise MismatchError(
            f"{name} and {other_name} differ in {difference.kind} {difference.name!r}: "
            f"{difference.mine} at {name}, {difference.theirs} at "
            f"{other_name}{_advice(difference, mine)}"
        )
    for kind, own_values, other_values in _compared(mine, theirs):
        if list(own_values) != list(other_values):
            advice = "build both models" if kind == "tensor" else "start both"
            raise MismatchError(
                f"{name} and {other_name} have the same {kind}s in different orders: {advice} in "
                "the same way"
            )


def _advice(difference: Difference, schema: Schema) -> str:
    if difference.name == "committed":
        return ". Load states on all replicas that were saved after the same outer step."
    if difference.kind == "setting":
        return ". Start all replicas with the same settings."
    if other := only_another(difference):
        return f". Start all replicas with the same {other}."
    if " with values " not in difference.mine or " with values " not in difference.theirs:
        return ". Build the same model on all replicas."
    advice = (
        ". Give all replicas the same values before the block is entered: load the same "
        "checkpoint, or build the model from the same seed."
    )
    begins = schema.settings.get("init") == "check" and schema.settings.get("committed") == "0"
    if begins and " in fragment " in difference.mine:
        advice += (
            " Or leave out init='check': with init='rank0' all replicas begin with the values of "
            "rank 0."
        )
    return advice


NOT_GIVEN = "not given"
"""How errors call a setting that was left out."""


class Difference(NamedTuple):
    """A setting or tensor in which two replicas differ.

    Attributes:
        kind: ``setting`` or ``tensor``.
        name: The name of the setting or tensor.
        mine: What this replica has; ``absent``, or :data:`NOT_GIVEN` for a setting.
        theirs: What the other replica has, likewise.
    """

    kind: str
    name: str
    mine: str
    theirs: str


def only_another(difference: Difference) -> str:
    """Return ``fragments`` or ``outer_groups`` if a tensor is only in another one of these.

    Return an empty string if it differs otherwise.
    """
    for kind, what in (("fragment", "fragments"), ("outer group", "outer_groups")):
        lines = [re.sub(f" in {kind} [0-9]+", "", line) for line in difference[2:]]
        if difference.kind == "tensor" and lines[0] == lines[1]:
            return what
    return ""


def first_difference(mine: Schema, theirs: Schema) -> Difference | None:
    """Return the first setting or tensor in which two replicas differ.

    Return None if they differ at most in the order.
    """
    for kind, own_values, other_values in _compared(mine, theirs):
        for name in [*own_values, *(name for name in other_values if name not in own_values)]:
            if own_values.get(name) != other_values.get(name):
                groups = _groups_of(own_values), _groups_of(other_values)
                if name.startswith("outer_") and groups[0] != groups[1]:
                    return Difference("setting", "outer_groups", *groups)
                missing = NOT_GIVEN if kind == "setting" else "absent"
                own_value = own_values.get(name, missing)
                return Difference(kind, name, own_value, other_values.get(name, missing))
    return None


def _compared(
    mine: Schema, theirs: Schema
) -> list[tuple[str, Mapping[str, str], Mapping[str, str]]]:
    return [("setting", mine.settings, theirs.settings), ("tensor", mine.tensors, theirs.tensors)]


def _groups_of(settings: Mapping[str, str]) -> str:
    """Return the outer groups in the form in which they are given, with ``{...}`` for each.

    Each has an optimizer among its settings.
    """
    number = sum(
        re.fullmatch(r"outer_groups\[[0-9]+\]\.optimizer", name) is not None for name in settings
    )
    return f"[{', '.join(['{...}'] * number)}]" if number else NOT_GIVEN
