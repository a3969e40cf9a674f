"""Whether replicas have the same schema, and what they differ in where they do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .._errors import MismatchError

if TYPE_CHECKING:
    from ._base import Schema


def compare_schemas(name: str, mine: Schema, other_name: str, theirs: Schema) -> None:
    """Refuse replicas that differ.

    Args:
        name: The name of this replica in errors.
        mine: The schema of this replica.
        other_name: The name of the other replica, or of the run, in errors.
        theirs: The schema of the other replica or of the run.

    Raises:
        MismatchError: They differ. The message names the first setting or tensor that differs, and both values.
    """
    difference = first_difference(mine, theirs)
    if difference is not None:
        raise MismatchError(
            f"{name} and {other_name} differ in {difference.kind} {difference.name!r}: "
            f"{difference.mine} at {name}, {difference.theirs} at {other_name}{_advice(difference, mine)}"
        )
    for what, ours, others in (
        ("setting", mine.settings, theirs.settings),
        ("tensor", mine.tensors, theirs.tensors),
    ):
        if list(ours) != list(others):
            raise MismatchError(
                f"{name} and {other_name} have the same {what}s in different orders: build both models in the same way"
                if what == "tensor"
                else f"{name} and {other_name} have the same {what}s in different orders"
            )


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
