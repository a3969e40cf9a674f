"""Find the tensors of a model in the flat values that are synced and stored."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from .._arithmetic._layout import Group, Layout, Piece, Rule
from .._squares import sum_of_squares
from ._partition import NamedTensor

# Numbers below these stay finite when they are rounded to the dtype: half a step above its largest
# finite number.
_ROUNDS_TO_INFINITY = {torch.float16: 65520.0, torch.bfloat16: 2.0**128 - 2.0**119}


@dataclass(slots=True)
class Segment:
    """The place of a tensor in its group, from ``start`` to ``stop`` in elements.

    During a sync, ``values`` holds its values, flat.
    """

    named: NamedTensor
    start: int
    values: torch.Tensor | None = None

    @property
    def stop(self) -> int:
        return self.start + self.named.tensor.numel()


class Segments:
    """The tensors of a fragment, found by piece; and their values during a sync. Not thread-safe.

    Args:
        placed: The segments of each group; see :func:`arrange`.

    Attributes:
        placed: As given.
    """

    def __init__(self, placed: Sequence[Sequence[Segment]]) -> None:
        self.placed = placed
        self._starts = [[segment.start for segment in segments] for segments in placed]
        # The same pieces come back several times in a sync, and in every sync.
        self._parts: dict[Piece, list[tuple[Segment, int, int]]] = {}
        self._overlaps: dict[Piece, list[tuple[torch.Tensor, int, int]]] = {}
        self._square_bounds = [_square_bound(segments) for segments in placed]

    def __iter__(self) -> Iterator[Segment]:
        return chain.from_iterable(self.placed)

    def begin(self) -> None:
        """Make flat views of the tensors.

        A tensor that is not contiguous is copied until :meth:`finish`.
        """
        self._overlaps.clear()
        for segment in self:
            segment.values = segment.named.tensor.detach().reshape(-1)

    def finish(self, *, adopted: bool) -> None:
        """Write copied tensors back.

        If new values were adopted, delete the gradients, which belong to the old values.
        """
        with torch.no_grad():
            for segment in self:
                tensor, values = segment.named.tensor, segment.values
                if values is None:
                    continue
                if values.data_ptr() != tensor.data_ptr() and tensor.numel():
                    tensor.copy_(values.view(tensor.shape))
                if segment.named.rule is Rule.OUTER and adopted:
                    tensor.grad = None
        self.forget()

    def forget(self) -> None:
        """Let go of the flat views."""
        self._overlaps.clear()
        for segment in self:
            segment.values = None

    def starts(self, group: int) -> Sequence[int]:
        """Return where the tensors of a group start in it, in order."""
        return self._starts[group]

    def locate(self, piece: Piece, index: int) -> str:
        """The name of the tensor that holds element ``index`` of the piece."""
        return self.placed[piece.group][self._at(piece.group, piece.start + index)].named.name

    def not_finite(self, piece: Piece, values: torch.Tensor) -> tuple[str, torch.dtype] | None:
        """Return name and dtype of a tensor in which a piece's values would be NaN or infinite.

        None if there is none.
        """
        # The sum of squares is a bound for every value, and shows NaN and infinity. It costs less
        # than a tenth of the step.
        bound = self._square_bounds[piece.group]
        if not values.is_floating_point() or sum_of_squares(values) < bound:
            return None
        for segment, start, stop in self.parts(piece):
            dtype = segment.named.tensor.dtype
            if not values[start - piece.start : stop - piece.start].to(dtype).isfinite().all():
                return segment.named.name, dtype
        return None

    def overlaps(self, piece: Piece) -> list[tuple[torch.Tensor, int, int]]:
        """Return the tensors' values in a piece, as flat tensors.

        Each comes with where in the group it starts and stops.
        """
        values = self._overlaps.get(piece)
        if values is None:
            values = self._overlaps[piece] = [
                (ready(segment)[start - segment.start : stop - segment.start], start, stop)
                for segment, start, stop in self.parts(piece)
            ]
        return values

    def parts(self, piece: Piece) -> list[tuple[Segment, int, int]]:
        """Return the tensors that have elements in a piece.

        Each comes with where in the group these elements start and stop.
        """
        if piece not in self._parts:
            self._parts[piece] = list(self._parts_in(piece))
        return self._parts[piece]

    def _parts_in(self, piece: Piece) -> Iterator[tuple[Segment, int, int]]:
        for segment in self.placed[piece.group][self._at(piece.group, piece.start) :]:
            if segment.start >= piece.stop:
                break
            start, stop = max(piece.start, segment.start), min(piece.stop, segment.stop)
            if start < stop:
                yield segment, start, stop

    def _at(self, group: int, element: int) -> int:
        """The number of the segment that holds an element of a group."""
        return bisect_right(self._starts[group], element) - 1


def ready(segment: Segment) -> torch.Tensor:
    """The values of a segment between ``begin()`` and ``finish()``."""
    if segment.values is None:
        raise RuntimeError("the values of a fragment were used before its begin() was called")
    return segment.values


def _square_bound(segments: Sequence[Segment]) -> float:
    """Return a bound for the sum of a chunk's squares.

    Below it, all values of the chunk are finite in the model's dtypes.
    """
    dtype = segments[0].named.wire_dtype
    narrowest = min(_ROUNDS_TO_INFINITY.get(s.named.tensor.dtype, math.inf) for s in segments)
    return min(narrowest**2, torch.finfo(dtype).max) if dtype.is_floating_point else math.inf


def arrange(tensors: Sequence[NamedTensor]) -> tuple[tuple[Group, ...], list[list[Segment]]]:
    """Arrange tensors in groups by dtype, rule and outer parameter group.

    Returns the groups, and each group's segments.

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
    """Describe groups and tensors for the manifest, so that the files need no model to be read."""
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
