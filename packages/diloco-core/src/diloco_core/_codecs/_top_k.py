"""The largest values of each block, in two bits each: the compression of SparseLoCo (arXiv 2508.15706)."""

from __future__ import annotations

import torch

from ._blocks import BlockCodec, copied

_BLOCK = 4096
_BINS = 4
_TABLE_BYTES = 4 * _BINS
# A bin has the width of 6 standard deviations divided by the number of bins.
_SIGMAS = 6.0
_TINY = torch.finfo(torch.float32).tiny


class TopK(BlockCodec):
    """Of each block of 4,096 values the k with the largest magnitudes, in two bits each. All others are sent as zeros.

    A block becomes a table of four float32, the positions of the k values with 12 bits each, in ascending order, and the number
    of a table entry for each of them. As in SparseLoCo's code, these values are cut into four bins of 1.5 standard deviations
    around their mean, and an entry of the table is the mean of the values in its bin. A shorter block at the end sends k in the
    same proportion, and at least one.

    It differs from that code in two ways: it cuts the flat parameters of a fragment into blocks, and not each matrix into tiles
    of at most 64 x 64; and each block has a table of its own, and not each tensor.

    Args:
        k: How many values of a whole block are sent.
    """

    sparse = True

    def __init__(self, k: int) -> None:
        super().__init__(f"topk{k}", _BLOCK)
        self._k = k

    def _sent(self, numel: int) -> int:
        """How many values of a block are sent: k in proportion, rounded half up, and at least one."""
        return max(1, (2 * numel * self._k + _BLOCK) // (2 * _BLOCK))

    def row_bytes(self, numel: int) -> int:
        """A table, 12 bits for a position, and two bits for a bin."""
        k = self._sent(numel)
        return _TABLE_BYTES + _position_bytes(k) + -(-k // 4)

    def encode_rows(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Choose values, and find their bins and the mean of each bin."""
        k = self._sent(rows.shape[1])
        positions = rows.abs().topk(k, 1, sorted=False).indices.sort(1).values
        values = rows.gather(1, positions).double()
        mean = _sum(values) / k
        centred = values - mean
        width = (_sum(centred.square()) / max(1, k - 1)).sqrt_().mul_(_SIGMAS / _BINS)
        # Where all values are equal, they are divided by zero, and share a bin.
        steps = (centred / width).round_().add_(_BINS // 2).nan_to_num_(float(_BINS // 2))
        bins = steps.clamp_(0, _BINS - 1).to(torch.uint8)
        table = torch.cat([_mean(values, bins == number) for number in range(_BINS)], 1).float()
        # Some processors take smaller numbers for zero, and others do not.
        table.masked_fill_(table.abs() < _TINY, 0.0)
        table.masked_fill_(~mean.isfinite(), torch.nan)
        end = _TABLE_BYTES + _position_bytes(k)
        out[:, :_TABLE_BYTES].copy_(table.view(torch.uint8))
        out[:, _TABLE_BYTES:end].copy_(_pack_positions(positions))
        out[:, end:].copy_(_pack_bins(bins))

    def decode_rows(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Look the bins up, and put their means where they belong."""
        k = self._sent(out.shape[1])
        end = _TABLE_BYTES + _position_bytes(k)
        table = copied(data[:, :_TABLE_BYTES]).view(torch.float32)
        positions = _unpack_positions(data[:, _TABLE_BYTES:end], k)
        # Bytes are decoded before their checksum is known, and positions of damaged ones may lie outside.
        positions.clamp_(max=out.shape[1] - 1)
        values = table.gather(1, _unpack_bins(data[:, end:], k))
        out.zero_().scatter_(1, positions, values)


def _position_bytes(k: int) -> int:
    return (3 * k + 1) // 2


def _sum(values: torch.Tensor) -> torch.Tensor:
    """The sum of each row, in an order that does not depend on the number of rows: halves are added to halves."""
    while values.shape[1] > 1:
        if values.shape[1] % 2:
            values = torch.nn.functional.pad(values, (0, 1))
        half = values.shape[1] // 2
        values = values[:, :half] + values[:, half:]
    return values


def _mean(values: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The mean of the chosen values of each row; 0 if there are none."""
    return _sum(values.masked_fill(~chosen, 0.0)) / chosen.sum(1, keepdim=True).clamp_(min=1)


def _pack_positions(positions: torch.Tensor) -> torch.Tensor:
    """Numbers below 4,096 as 12 bits each: two in three bytes, the lowest bits first."""
    k = positions.shape[1]
    pairs = torch.nn.functional.pad(positions.to(torch.int32), (0, k % 2)).view(
        len(positions), -1, 2
    )
    both = pairs[:, :, 0] | pairs[:, :, 1] << 12
    three = torch.stack((both & 255, both >> 8 & 255, both >> 16), 2)
    return three.to(torch.uint8).view(len(positions), -1)[:, : _position_bytes(k)]


def _unpack_positions(data: torch.Tensor, k: int) -> torch.Tensor:
    padded = torch.nn.functional.pad(data, (0, k % 2))
    three = padded.to(torch.int64).view(len(data), -1, 3)
    both = three[:, :, 0] | three[:, :, 1] << 8 | three[:, :, 2] << 16
    return torch.stack((both & 4095, both >> 12), 2).view(len(data), -1)[:, :k]


def _pack_bins(bins: torch.Tensor) -> torch.Tensor:
    """Four numbers below 4 in a byte, the first in the lowest bits."""
    four = torch.nn.functional.pad(bins, (0, -bins.shape[1] % 4)).view(len(bins), -1, 4)
    return four[:, :, 0] | four[:, :, 1] << 2 | four[:, :, 2] << 4 | four[:, :, 3] << 6


def _unpack_bins(data: torch.Tensor, k: int) -> torch.Tensor:
    wide = data.to(torch.int64)
    four = torch.stack([wide >> shift & 3 for shift in (0, 2, 4, 6)], 2)
    return four.view(len(data), -1)[:, :k]
