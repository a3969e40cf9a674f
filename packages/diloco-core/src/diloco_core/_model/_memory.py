"""Finding out whether tensors share memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

# A parameter that is made from a tensor of another class has that class, and is not a
# torch.nn.Parameter.
_PLAIN = {torch.Tensor, torch.nn.Parameter}


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's first element; 0 if it is not known.

    It is not known for kinds of tensors that consist of other tensors.
    """
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_meta:
        return 0
    return tensor.data_ptr()


def first_overlap(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Two tensors that share an element; None if there are none.

    A tensor whose own elements share memory is returned as both. Takes O(n log n) if the tensors'
    ranges of memory do not overlap. No value is read.
    """
    dense = [tensor for tensor in tensors if tensor.numel() and address(tensor)]
    dense.sort(key=lambda tensor: (str(tensor.device), address(tensor)))
    candidates: list[torch.Tensor] = []  # earlier tensors whose ranges may reach into the next one
    for tensor in dense:
        if _overlaps_itself(tensor):
            return tensor, tensor
        candidates = [
            other
            for other in candidates
            if other.device == tensor.device and _end(other) > address(tensor)
        ]
        for other in candidates:
            if _share(other, tensor):
                return other, tensor
        candidates.append(tensor)
    return None


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Say whether two elements of a tensor are at the same address, as in an expanded tensor."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            # Elements may overlap: mark the place of each, and count the places.
            marks = np.zeros(_extent(tensor), dtype=bool)
            np.lib.stride_tricks.as_strided(marks, tensor.shape, tensor.stride())[...] = True
            return int(marks.sum()) < tensor.numel()
        reach += (size - 1) * stride
    return False


def _extent(tensor: torch.Tensor) -> int:
    """Number of places in memory, in elements, from the first to the last element of a tensor."""
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _end(tensor: torch.Tensor) -> int:
    return address(tensor) + _extent(tensor) * tensor.itemsize


def _share(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Say whether two tensors with overlapping ranges share an element.

    Two columns of a matrix, which alternate, do not.
    """
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
