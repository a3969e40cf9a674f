"""Where the tensors of a model are in the flat values that are synced and stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._arithmetic._layout import Group, Layout, Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ._partition import NamedTensor


@dataclass(slots=True)
class Segment:
    """The place of a tensor in its group, from ``start`` to ``stop`` in elements; ``values``: flat, during a sync."""

    named: NamedTensor
    start: int
    values: torch.Tensor | None = None

    @property
    def stop(self) -> int:
        return self.start + self.named.tensor.numel()


def arrange(tensors: Sequence[NamedTensor]) -> tuple[tuple[Group, ...], list[list[Segment]]]:
    """Arrange tensors in groups by dtype, rule and outer parameter group. Returns the groups, and each group's segments.

    Those of the widest dtype come first.
    """
    members: dict[tuple[torch.dtype, Rule, int], list[NamedTensor]] = {}
    for named in tensors:
        key = (named.wire_dtype, named.rule, named.outer_group or 0)
        members.setdefault(key, []).append(named)
    groups: list[Group] = []
    placed: list[list[Segment]] = []
    for key in sorted(members, key=lambda key: (-key[0].itemsize, str(key[:2]), key[2])):
        segments: list[Segment] = []
        for named in members[key]:
            segments.append(Segment(named, segments[-1].stop if segments else 0))
        placed.append(segments)
        groups.append(Group(key[0], segments[-1].stop, key[1]))
    return tuple(groups), placed


def tensor_table(layout: Layout, placed: Sequence[Sequence[Segment]]) -> dict[str, Any]:
    """The groups and tensors as a table for the manifest, so that the files can be read without a model."""
    groups = [{"dtype": str(g.dtype), "numel": g.numel, "rule": str(g.rule)} for g in layout.groups]
    tensors = [
        {
            "name": segment.named.name,
            "group": group,
            "start": segment.start,
            "shape": list(segment.named.tensor.shape),
            "dtype": str(segment.named.tensor.dtype),
        }
        for group, segments in enumerate(placed)
        for segment in segments
    ]
    # Absent from runs without a codec, whose manifests are older than codecs.
    cut = {} if layout.block == 1 else {"block": layout.block}
    return {"groups": groups, "tensors": tensors, **cut}
