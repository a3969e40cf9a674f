"""Whether replicas have the same schema, and what they differ in where they do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .._errors import MismatchError

if TYPE_CHECKING:
    from ._base import Schema


def compare_schemas(here: str, mine: Schema, there: str, theirs: Schema) -> None:
    """Refuse replicas that differ.

    Args:
        here: What this replica is called in errors.
        mine: Its schema.
        there: What the other replica, or the run, is called in errors.
        theirs: Its schema.

    Raises:
        MismatchError: It names the first setting or tensor that differs, and both values.
    """
    difference = first_difference(mine, theirs)
    if difference is not None:
        raise MismatchError(
            f"{here} and {there} differ in {difference.kind} {difference.name!r}: "
            f"{difference.mine} at {here}, {difference.theirs} at {there}{_advice(difference, mine)}"
        )
    for what, ours, others in (
        ("setting", mine.settings, theirs.settings),
        ("tensor", mine.tensors, theirs.tensors),
    ):
        if list(ours) != list(others):
            raise MismatchError(f"{here} and {there} have the same {what}s in another order")


def _advice(difference: Difference, schema: Schema) -> str:
    if " with values " not in difference.mine or " with values " not in difference.theirs:
        return ""
    advice = (
        ". Give all replicas the same values before the block is entered: load the same checkpoint, or build the model from "
        "the same seed."
    )
    begins = schema.settings.get("init") == "check" and schema.settings.get("committed") == "0"
    if begins and " in fragment " in difference.mine:
        advice += " Or leave out init='check': with init='rank0' all replicas begin with the values of rank 0."
    return advice


class Difference(NamedTuple):
    """Something in which two replicas differ.

    Attributes:
        kind: ``setting`` or ``tensor``.
        name: Its name.
        mine: What one replica has, or ``absent``.
        theirs: What the other one has.
    """

    kind: str
    name: str
    mine: str
    theirs: str


def first_difference(mine: Schema, theirs: Schema) -> Difference | None:
    """The first setting or tensor in which two replicas differ; None where there is none, but for the order."""
    for kind, ours, others in (
        ("setting", mine.settings, theirs.settings),
        ("tensor", mine.tensors, theirs.tensors),
    ):
        for name in [*ours, *(name for name in others if name not in ours)]:
            if ours.get(name) != others.get(name):
                return Difference(kind, name, ours.get(name, "absent"), others.get(name, "absent"))
    return None
