"""Eight bits per value, with a codebook per block."""

from __future__ import annotations

import torch

from ._blocks import BlockCodec, copied

_BINS = 256
_CODEBOOK_BYTES = 4 * _BINS
_SIGMAS = 6.0


class SixSigma(BlockCodec):
    """int8-6sigma: 256 bins between six standard deviations below and above the mean, as in INTELLECT-1 (arXiv 2412.01152).

    Each block of 65,536 values begins with a codebook, the mean of the values in each bin as float32; a value is sent as the
    number of its bin. Inside the range a decoded value differs from the original by the width of a bin at most: 3/64 of the
    standard deviation. Values beyond the range share the first or the last bin, and are sent as the mean of that bin.
    """

    def __init__(self) -> None:
        super().__init__("int8-6sigma", 65536)

    def row_bytes(self, numel: int) -> int:
        """A codebook, and a byte per value."""
        return _CODEBOOK_BYTES + numel

    def encode_rows(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Find the bin of each value, and the mean of each bin."""
        one = torch.ones(1, dtype=torch.float64, device="cpu")
        for row, encoded in zip(rows, out, strict=True):
            values = row.double()
            mean, deviation = values.mean(), values.std(correction=0)
            width = deviation * (2 * _SIGMAS / _BINS)
            # Where all values are equal, they are divided by zero, and share the first bin or the last one.
            steps = (values - (mean - _SIGMAS * deviation)).div_(width)
            bins = steps.nan_to_num_(0.0).clamp_(0, _BINS - 1).to(torch.int64)
            # One value after the other, as bincount() does, which takes longer.
            sums, members = torch.zeros(2, _BINS, dtype=torch.float64, device="cpu")
            sums.scatter_add_(0, bins, values)
            members.scatter_add_(0, bins, one.expand_as(bins))
            codebook = sums / members.clamp_(min=1)
            encoded[:_CODEBOOK_BYTES].copy_(codebook.float().view(torch.uint8))
            encoded[_CODEBOOK_BYTES:].copy_(bins)

    def decode_rows(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Look the bins up."""
        for encoded, row in zip(data, out, strict=True):
            codebook = copied(encoded[:_CODEBOOK_BYTES]).view(torch.float32)
            torch.index_select(codebook, 0, encoded[_CODEBOOK_BYTES:].int(), out=row)
