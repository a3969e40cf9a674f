"""Find the largest magnitudes of each block. ``torch.topk`` would take three times as long.

With numpy, which has a quick partition and quickly finds the few elements of a mask that are true.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch

from ._blocks import work

# Indices and values.
_Found: TypeAlias = tuple[np.ndarray, np.ndarray]
# Where the values are that are as large as the k-th largest of their row, what they are, and for
# which rows these are k. For the other rows, it is not known which values they are.
_FoundClearly: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]

# For each value that is chosen, a block is cut into so many groups. With more of them, fewer
# candidates are left.
_GROUPS = 4
# So many more values than k are looked at by their keys, the places in which are below this number.
_SPARE = 16
_PLACES = 4096
_ALL_PLACES = torch.arange(_PLACES, dtype=torch.int32, device="cpu")
_MAGNITUDE = 0x7FFFFFFF  # the bits of a float without its sign
# Where numpy partitions with vector instructions, whole rows of keys take it less time than the
# other way takes to find the few elements of a mask that are true. Where it does not, they take
# three times as long.
_PARTITION_IS_QUICK = np.lib.NumpyVersion(
    np.__version__
) >= "2.0.0" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def largest(rows: torch.Tensor, k: int) -> _Found:
    """Return the places and the values of the k largest magnitudes in each row of a matrix.

    NaN counts as larger than any number. Among equal magnitudes, ``torch.topk`` chooses.

    Args:
        rows: The blocks, contiguous float32 ``(blocks, elements)``.
        k: How many values of each block are chosen, at least 1 and at most all.

    Returns:
        The indices of the chosen values in the flat matrix, in ascending order, int64
        ``(blocks, k)``, and the values, float32 of the same shape.
    """
    blocks, numel = rows.shape
    result = (_by_keys if _PARTITION_IS_QUICK else _by_groups)(rows, k)
    if result is None:
        return _by_topk(rows, k)
    indices, values, clear = result
    # In other rows, more than k values are as large as the k-th largest one, or nearly so.
    if clear.all():
        return indices.reshape(blocks, k), values.reshape(blocks, k)
    chosen, unclear = np.empty((blocks, k), np.int64), np.flatnonzero(~clear)
    chosen[clear] = indices[clear[indices // numel]].reshape(-1, k)
    again, _ = _by_topk(rows[torch.from_numpy(unclear)], k)
    chosen[unclear] = again + (unclear - np.arange(len(unclear)))[:, None] * numel
    return chosen, rows.numpy().reshape(-1)[chosen]


def _by_keys(rows: torch.Tensor, k: int) -> _FoundClearly | None:
    """By keys; None if the rows are too short, or too long.

    A number and its place are one key: the place takes the lowest bits, and the sign is left out.
    The bits of positive numbers are in the order of the numbers, with NaN at the end. Some more of
    the largest keys than k are looked at, so that the bits that keys lack seldom matter.
    """
    blocks, numel = rows.shape
    looked_at = k + _SPARE
    if looked_at > numel or numel > _PLACES:
        return None
    keys = work(0, rows).view(torch.int32)
    torch.bitwise_and(rows.view(torch.int32), _MAGNITUDE & -_PLACES, out=keys)
    matrix = keys.bitwise_or_(_ALL_PLACES[:numel]).numpy()
    matrix.partition(numel - looked_at, 1)
    largest_keys = matrix[:, -looked_at:]
    places = largest_keys & (_PLACES - 1)
    places.sort(1)
    candidates = places + _starts(blocks, numel)
    # With mode="clip" this takes half as long as indexing does. All candidates are indices of the
    # matrix.
    values = rows.numpy().take(candidates, mode="clip")
    magnitudes = values.view(np.int32) & _MAGNITUDE
    least = np.partition(magnitudes, -k, 1)[:, -k]
    is_chosen = magnitudes >= least[:, None]
    chosen = np.flatnonzero(is_chosen)
    # Whatever was not looked at is smaller than that.
    bound = largest_keys[:, 0] | (_PLACES - 1)
    clear = (bound < least) & (is_chosen.sum(1, dtype=np.uint16) == k)
    return candidates.take(chosen, mode="clip"), values.take(chosen, mode="clip"), clear


def _by_groups(rows: torch.Tensor, k: int) -> _FoundClearly | None:
    """With much less to partition; None if rows cannot be cut into equal groups."""
    blocks, numel = rows.shape
    if numel % (_GROUPS * k):
        return None
    bits = torch.abs(rows, out=work(0, rows)).view(torch.int32)
    # At least k values are as large as the k-th largest of the groups' maxima, and few others are.
    maxima = bits.view(blocks, -1, _GROUPS * k).amax(1).numpy()
    matrix = bits.numpy()
    candidates = np.flatnonzero(matrix >= np.partition(maxima, -k, 1)[:, -k, None])
    magnitudes = matrix.reshape(-1)[candidates]
    counts = np.diff(np.searchsorted(candidates, np.arange(blocks + 1) * numel))
    # A row for each block, filled up with what is smaller than any magnitude.
    table = np.full((blocks, counts.max()), -1, np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = magnitudes
    least = np.partition(table, -k, 1)[:, -k, None]
    chosen = candidates[magnitudes >= np.repeat(least, counts)]
    return chosen, rows.numpy().reshape(-1)[chosen], (table >= least).sum(1) == k


def _by_topk(rows: torch.Tensor, k: int) -> _Found:
    order = torch.abs(rows).topk(k, 1, sorted=False).indices.sort(1).values
    chosen = order.numpy() + _starts(*rows.shape)
    return chosen, rows.numpy().reshape(-1)[chosen]


def _starts(blocks: int, numel: int) -> np.ndarray:
    """The index of the first element of each row, ``(blocks, 1)``."""
    return np.arange(blocks)[:, None] * numel
