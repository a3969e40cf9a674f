"""Where the largest magnitudes of each block are. ``torch.topk`` would take three times as long.

With numpy, which has a quick partition and quickly finds the few elements of a mask that are true.
"""

from __future__ import annotations

import numpy as np
import torch

from ._blocks import work

# For each value that is chosen, a block is cut into so many groups. With more of them, fewer candidates are left.
_GROUPS = 4
# So many more values than k are looked at by their keys, the places in which are below this number.
_SPARE = 16
_PLACES = 4096
# Where numpy partitions with vector instructions, whole rows of keys take it less time than the other way takes to find the few
# elements of a mask that are true. Where it does not, they take three times as long.
_PARTITION_IS_QUICK = np.lib.NumpyVersion(
    np.__version__
) >= "2.0.0" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


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
    find = _by_keys if _PARTITION_IS_QUICK else _by_groups
    # The bits of positive numbers are in the order of the numbers, with NaN at the end.
    found = find(magnitudes.view(torch.int32), k)
    if found is None:
        return _by_topk(magnitudes, k, _starts(blocks, numel))
    chosen, clear = found
    # In other rows, more than k values are as large as the k-th largest one, or nearly so.
    if clear.all():
        return chosen.reshape(blocks, k)
    places = np.empty((blocks, k), np.int64)
    places[clear] = chosen[clear[chosen // numel]].reshape(-1, k)
    places[~clear] = _by_topk(
        magnitudes[torch.from_numpy(~clear)], k, _starts(blocks, numel)[~clear]
    )
    return places


def _by_keys(bits: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Where values are that are as large as the k-th largest of their row, and for which rows these are k values.

    For the other rows, it is not known which values they are. None if the rows are too short, or too long.

    A number and its place are one key: the place takes the lowest bits. Some more of the largest keys than k are looked at, so
    that the bits that keys lack seldom matter.
    """
    blocks, numel = bits.shape
    looked_at = k + _SPARE
    if looked_at > numel or numel > _PLACES:
        return None
    keys = torch.bitwise_and(bits, -_PLACES, out=work(1, bits).view(torch.int32))
    matrix = keys.bitwise_or_(torch.arange(numel, dtype=torch.int32, device="cpu")).numpy()
    matrix.partition(numel - looked_at, 1)
    largest_keys = matrix[:, -looked_at:]
    places = largest_keys & (_PLACES - 1)
    places.sort(1)
    candidates = places + _starts(blocks, numel)
    table = bits.numpy().reshape(-1)[candidates]
    least = np.partition(table, -k, 1)[:, -k]
    chosen = table >= least[:, None]
    # Whatever was not looked at is smaller than that.
    bound = largest_keys[:, 0] | (_PLACES - 1)
    return candidates[chosen], (bound < least) & (chosen.sum(1) == k)


def _by_groups(bits: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The same with much less to partition; None if rows cannot be cut into equal groups."""
    blocks, numel = bits.shape
    if numel % (_GROUPS * k):
        return None
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
    return candidates[found >= np.repeat(least, counts)], (table >= least).sum(1) == k


def _by_topk(magnitudes: torch.Tensor, k: int, starts: np.ndarray) -> np.ndarray:
    positions: np.ndarray = magnitudes.topk(k, 1, sorted=False).indices.sort(1).values.numpy()
    positions += starts
    return positions


def _starts(blocks: int, numel: int) -> np.ndarray:
    """The index of the first element of each row, ``(blocks, 1)``."""
    return np.arange(blocks)[:, None] * numel
