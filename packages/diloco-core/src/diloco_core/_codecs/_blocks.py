"""Share what the codecs have in common that encode values block by block."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import torch

from ._plain import rounded

# Larger buffers are not kept. Chunks are smaller, unless the user chose very large ones.
_KEPT_BYTES = 2**22


class BlockCodec(ABC):
    """Encodes values in blocks, each of which becomes a row of bytes; see :class:`._codec.Codec`.

    The last block of a shard may be shorter. Values of every dtype are encoded as float32: numbers
    in float64 that are too large for it become its largest number.

    A block that holds NaN or infinity also does after decoding, though not only in the same places.
    """

    plain = False

    def __init__(self, name: str, block: int) -> None:
        self.name = name
        self.block = block

    def size(self, dtype: torch.dtype, numel: int) -> int:  # noqa: ARG002
        """The bytes of the whole blocks, and of a shorter one at the end."""
        blocks, rest = divmod(numel, self.block)
        return blocks * self.row_bytes(self.block) + (self.row_bytes(rest) if rest else 0)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Encode a chunk block by block."""
        values = rounded(values, torch.float32)
        data = torch.empty(self.size(values.dtype, values.numel()), dtype=torch.uint8, device="cpu")
        for rows, encoded in self._matrices(values, data):
            self.encode_rows(rows, encoded)
        return data

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Decode a chunk block by block."""
        values = out if out.dtype is torch.float32 else torch.empty_like(out, dtype=torch.float32)
        for rows, encoded in self._matrices(values, data):
            self.decode_rows(encoded, rows)
        if values is not out:
            out.copy_(values)

    def _matrices(
        self, values: torch.Tensor, data: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the whole blocks and their bytes as the rows of matrices.

        A shorter block at the end is the only row of a matrix of its own.
        """
        width = self.row_bytes(self.block)
        blocks, rest = divmod(values.numel(), self.block)
        end = blocks * self.block
        matrices = []
        if blocks:
            whole = data[: blocks * width].view(blocks, width)
            matrices.append((values[:end].view(blocks, self.block), whole))
        if rest:
            matrices.append((values[end:].view(1, rest), data[blocks * width :].view(1, -1)))
        return matrices

    @abstractmethod
    def row_bytes(self, numel: int) -> int:
        """Bytes of a block of ``numel`` elements."""

    @abstractmethod
    def encode_rows(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Encode blocks of equal length.

        ``rows`` is float32 ``(blocks, elements)``, and ``out`` is uint8 ``(blocks, bytes)``.
        """

    @abstractmethod
    def decode_rows(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """The reverse of :meth:`encode_rows`."""


class _Work(threading.local):
    """Buffers of one thread.

    New memory for every chunk would cost several times as much as what is done in it.
    """

    def __init__(self) -> None:
        self.buffers: dict[int, torch.Tensor] = {}


_work = _Work()


def work(which: int, rows: torch.Tensor) -> torch.Tensor:
    """Return a float32 buffer in the shape of ``rows``, with anything in it.

    It is the same memory whenever this thread asks for ``which``.
    """
    buffer = _work.buffers.get(which)
    if buffer is None or buffer.numel() < rows.numel():
        # A tensor that is made inside torch.inference_mode() could not be used outside of it.
        with torch.inference_mode(mode=False):
            buffer = torch.empty(rows.numel(), dtype=torch.float32, device="cpu")
        if buffer.nbytes <= _KEPT_BYTES:
            _work.buffers[which] = buffer
    return buffer[: rows.numel()].view(rows.shape)
