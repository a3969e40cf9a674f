"""The largest values of each block, in two bits each, as in SparseLoCo (arXiv 2508.15706)."""

from __future__ import annotations

import numpy as np
import torch

from ._blocks import BlockCodec, work

_BLOCK = 4096
_BINS = 4
_TABLE_BYTES = 4 * _BINS
# A bin has the width of 6 standard deviations divided by the number of bins.
_SIGMAS = 6.0
_TINY = np.finfo(np.float32).tiny
# For each value that is chosen, a block is cut into so many groups. With more of them, fewer
# candidates are left.
_GROUPS = 4


class TopK(BlockCodec):
    """Sends the k largest magnitudes of each block of 4,096 values, in two bits each.

    All others are sent as zeros.

    A block becomes a table of four float32, the positions of the k values with 12 bits each, in
    ascending order, and the number of a table entry for each of them. As in SparseLoCo's code,
    these values are cut into four bins of 1.5 standard deviations around their mean, and an entry
    of the table is the mean of the values in its bin. A shorter block at the end sends k in the
    same proportion, and at least one.

    It differs from that code in two ways: it cuts the flat parameters of a fragment into blocks,
    and not each matrix into tiles of at most 64 x 64; and each block has a table of its own, and
    not each tensor.

    Args:
        k: How many values of a whole block are sent.
    """

    sparse = True

    def __init__(self, k: int) -> None:
        super().__init__(f"topk{k}", _BLOCK)
        self._k = k

    def _sent(self, numel: int) -> int:
        """Return how many values of a block are sent: k in proportion, rounded half up.

        At least one is sent.
        """
        return max(1, (2 * numel * self._k + _BLOCK) // (2 * _BLOCK))

    def row_bytes(self, numel: int) -> int:
        """A table, 12 bits for a position, and two bits for a bin."""
        k = self._sent(numel)
        return _TABLE_BYTES + _position_bytes(k) + -(-k // 4)

    def encode_rows(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Choose values, and find their bins and the mean of each bin."""
        blocks, numel = rows.shape
        k = self._sent(numel)
        chosen, largest_values = _largest(rows, k)
        # A column for each block, so that the numbers of all blocks are added at once.
        values = largest_values.T.astype(np.float64, order="C")
        bins, table = _quantized(values)
        end = _TABLE_BYTES + _position_bytes(k)
        data = out.numpy()
        data[:, :_TABLE_BYTES] = table.T.copy().view(np.uint8)
        positions = (chosen - numel * np.arange(blocks)[:, None]).astype(np.uint16)
        _pack_positions(positions, data[:, _TABLE_BYTES:end])
        data[:, end:] = _pack_bins(bins).T

    def decode_rows(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Look the bins up, and put their means where they belong."""
        blocks, numel = out.shape
        k = self._sent(numel)
        end = _TABLE_BYTES + _position_bytes(k)
        encoded = data.numpy()
        table = encoded[:, :_TABLE_BYTES].copy().view(np.float32)
        positions = _unpack_positions(encoded[:, _TABLE_BYTES:end], k)
        # Bytes are decoded before their checksum is known, and damaged positions may lie outside.
        np.minimum(positions, numel - 1, out=positions)
        row = np.arange(blocks)[:, None]
        values = table.reshape(-1)[_unpack_bins(encoded[:, end:], k) + _BINS * row]
        out.zero_().numpy().reshape(-1)[positions + numel * row] = values


def _largest(rows: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the places and the values of the k largest magnitudes in each row of a matrix.

    NaN counts as larger than any number. Among equal magnitudes, ``torch.topk`` chooses. It would
    take seven times as long for all rows, so numpy finds most of the values.

    Args:
        rows: The blocks, contiguous float32 ``(blocks, elements)``.
        k: How many values of each block are chosen, at least 1 and at most all.

    Returns:
        The indices of the chosen values in the flat matrix, in ascending order, int64
        ``(blocks, k)``, and the values, float32 of the same shape.
    """
    blocks, numel = rows.shape
    if numel % (_GROUPS * k):  # the row cannot be cut into equal groups
        chosen = _by_topk(rows, k)
        return chosen, rows.numpy().reshape(-1)[chosen]
    # The bits of positive numbers are in the order of the numbers, with NaN at the end.
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
    # In other rows, more than k values are as large as the k-th largest one.
    clear = (table >= least).sum(1) == k
    if not clear.all():
        found, unclear = chosen, np.flatnonzero(~clear)
        chosen = np.empty((blocks, k), np.int64)
        chosen[clear] = found[clear[found // numel]].reshape(-1, k)
        again = _by_topk(rows[torch.from_numpy(unclear)], k)
        chosen[unclear] = again + (unclear - np.arange(len(unclear)))[:, None] * numel
    chosen = chosen.reshape(blocks, k)
    return chosen, rows.numpy().reshape(-1)[chosen]


def _by_topk(rows: torch.Tensor, k: int) -> np.ndarray:
    blocks, numel = rows.shape
    order = torch.abs(rows).topk(k, 1, sorted=False).indices.sort(1).values
    return order.numpy() + np.arange(blocks)[:, None] * numel


def _quantized(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bin of each value, and the mean of each bin.

    The bins are uint8 ``(k, blocks)``, the means float32 ``(bins, blocks)``.

    Args:
        values: The values that were chosen, float64 ``(k, blocks)``.
    """
    k = len(values)
    with np.errstate(all="ignore"):
        mean = _sum(values) / k
        centred = values - mean
        width = np.sqrt(_sum(centred * centred) / max(1, k - 1)) * (_SIGMAS / _BINS)
        steps = np.rint(centred / width) + _BINS // 2
        # Where all values are equal, they were divided by zero, and share a bin.
        steps[np.isnan(steps)] = _BINS // 2
        bins = steps.clip(0, _BINS - 1).astype(np.uint8)
        members = bins[:, None] == np.arange(_BINS, dtype=np.uint8)[:, None]
        counts = members.sum(0, dtype=np.uint16)
        table = (_sum(members * values[:, None]) / np.maximum(counts, 1)).astype(np.float32)
    # Some processors take smaller numbers for zero, and others do not.
    table[np.abs(table) < _TINY] = 0.0
    table[:, ~np.isfinite(mean)] = np.nan
    return bins, table


def _position_bytes(k: int) -> int:
    return (3 * k + 1) // 2


def _sum(values: np.ndarray) -> np.ndarray:
    """Sum over the first dimension, in an order that does not depend on the other dimensions.

    Halves are added to halves.
    """
    while len(values) > 1:
        if len(values) % 2:
            values = np.concatenate((values, np.zeros_like(values[:1])))
        half = len(values) // 2
        values = values[:half] + values[half:]
    total: np.ndarray = values[0]
    return total


def _pack_positions(positions: np.ndarray, out: np.ndarray) -> None:
    """Numbers below 4,096 as 12 bits each: two in three bytes, the lowest bits first."""
    first, second = positions[:, ::2], positions[:, 1::2]
    middle = first >> 8
    middle[:, : second.shape[1]] |= second << 4
    # As bytes, numbers are cut to their lowest eight bits.
    out[:, ::3], out[:, 1::3], out[:, 2::3] = first, middle, second >> 4


def _unpack_positions(data: np.ndarray, k: int) -> np.ndarray:
    positions = np.empty((len(data), k), np.uint16)
    first, second, middle = positions[:, ::2], positions[:, 1::2], data[:, 1::3].astype(np.uint16)
    first[:] = data[:, ::3]
    first |= (middle & 15) << 8
    second[:] = data[:, 2::3]
    second <<= 4
    second |= middle[:, : k // 2] >> 4
    return positions


def _pack_bins(bins: np.ndarray) -> np.ndarray:
    """Pack four numbers below 4 into a byte, the first in the lowest bits.

    All are in the first dimension.
    """
    packed = bins[::4].copy()
    for number in range(1, 4):
        part = bins[number::4]
        packed[: len(part)] |= part << 2 * number
    return packed


def _unpack_bins(data: np.ndarray, k: int) -> np.ndarray:
    bins = np.empty((len(data), k), np.uint8)
    for number in range(4):
        part = bins[:, number::4]
        np.bitwise_and(data[:, : part.shape[1]] >> 2 * number, 3, out=part)
    return bins
