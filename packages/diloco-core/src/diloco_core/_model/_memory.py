"""Whether tensors share memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

# A parameter made of a tensor of another class has that class, not torch.nn.Parameter's.
_PLAIN = {torch.Tensor, torch.nn.Parameter}


def address(tensor: torch.Tensor) -> int:
    """Where a tensor's first element lies; 0 where that is not known (kinds of tensors that are made of others)."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_meta:
        return 0
    return tensor.data_ptr()


def first_overlap(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Two tensors that share an element, or one twice whose own elements share memory; None where there are none.

    Costs O(n log n) where the ranges of the tensors are apart. No value is read.
    """
    dense = [tensor for tensor in tensors if tensor.numel() and address(tensor)]
    dense.sort(key=lambda tensor: (str(tensor.device), address(tensor)))
    before: list[torch.Tensor] = []
    for tensor in dense:
        if _overlaps_itself(tensor):
            return tensor, tensor
        before = [
            other
            for other in before
            if other.device == tensor.device and _end(other) > address(tensor)
        ]
        for other in before:
            if _share(other, tensor):
                return other, tensor
        before.append(tensor)
    return None


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor lie in the same place, as in an expanded one."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:  # perhaps: only the elements themselves tell
            marks = np.zeros(_extent(tensor), dtype=bool)
            np.lib.stride_tricks.as_strided(marks, tensor.shape, tensor.stride())[...] = True
            return int(marks.sum()) < tensor.numel()
        reach += (size - 1) * stride
    return False


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one of a tensor in memory."""
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _end(tensor: torch.Tensor) -> int:
    return address(tensor) + _extent(tensor) * tensor.itemsize


def _share(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors whose ranges overlap share an element: two columns of a matrix do not, though they alternate."""
    size, distance = first.itemsize, address(second) - address(first)
    if (
        first.is_contiguous()
        or second.is_contiguous()
        or second.itemsize != size
        or distance % size
    ):
        return True
    marks = np.zeros(max(_extent(first), distance // size + _extent(second)), dtype=bool)
    np.lib.stride_tricks.as_strided(marks, first.shape, first.stride())[...] = True
    part = marks[distance // size :]
    return bool(np.lib.stride_tricks.as_strided(part, second.shape, second.stride()).any())
