"""Where the largest magnitudes of each block are. ``torch.topk`` would take three times as long.

With numpy, which has a quick partition and quickly finds the few elements of a mask that are true.
"""

from __future__ import annotations

import numpy as np
import torch

from ._blocks import work

# For each value that is chosen, a block is cut into so many groups. With more of them, fewer candidates are left.
_GROUPS = 4


def largest(rows: torch.Tensor, k: int) -> np.ndarray:
    """Where in a matrix the k largest magnitudes of each row are.

    NaN counts as larger than any number. Of equal magnitudes, ``torch.topk`` decides which are chosen.

    Args:
        rows: The blocks, contiguous float32 ``(blocks, elements)``.
        k: How many values of each block are chosen, at least 1 and at most all.

    Returns:
        The indices of the chosen values in the flat matrix, in ascending order, int64 ``(blocks, k)``.
    """
    blocks, numel = rows.shape
    magnitudes = torch.abs(rows, out=work(0, rows))
    if numel % (_GROUPS * k):
        return _by_topk(magnitudes, k, _starts(blocks, numel))
    # The bits of positive numbers are in the order of the numbers, with NaN at the end.
    bits = magnitudes.view(torch.int32)
    # At least k values are as large as the k-th largest of the groups' maxima, and few others are.
    maxima = bits.view(blocks, -1, _GROUPS * k).amax(1).numpy()
    matrix = bits.numpy()
    candidates = np.flatnonzero(matrix >= np.partition(maxima, -k, 1)[:, -k, None])
    found = matrix.reshape(-1)[candidates]
    counts = np.diff(np.searchsorted(candidates, np.arange(blocks + 1) * numel))
    # A row for each block, filled up with what is smaller than any magnitude.
    table = np.full((blocks, counts.max()), -1, np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = found
    least = np.partition(table, -k, 1)[:, -k, None]
    chosen = candidates[found >= np.repeat(least, counts)]
    if len(chosen) == blocks * k:
        return chosen.reshape(blocks, k)
    # In some blocks, more than k values are as large as the k-th largest one.
    clear = (table >= least).sum(1) == k
    places = np.empty((blocks, k), np.int64)
    places[clear] = chosen[clear[chosen // numel]].reshape(-1, k)
    places[~clear] = _by_topk(
        magnitudes[torch.from_numpy(~clear)], k, _starts(blocks, numel)[~clear]
    )
    return places


def _by_topk(magnitudes: torch.Tensor, k: int, starts: np.ndarray) -> np.ndarray:
    positions: np.ndarray = magnitudes.topk(k, 1, sorted=False).indices.sort(1).values.numpy()
    positions += starts
    return positions


def _starts(blocks: int, numel: int) -> np.ndarray:
    """The index of the first element of each row, ``(blocks, 1)``."""
    return np.arange(blocks)[:, None] * numel
