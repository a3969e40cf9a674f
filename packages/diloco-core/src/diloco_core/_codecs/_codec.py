"""What a codec is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Codec(Protocol):
    """How values that take an outer step are sent. All replicas of a run have the same one, which their schemas compare.

    Everybody adds up what comes out of :meth:`decode`, the sender too: a codec may lose something, and replicas still agree.
    It sees one chunk at a time, whose size a replica chooses (a multiple of 16 elements, but for the last one of a shard):
    the bytes of a shard must be the same however it is cut. Thread-safe.

    Attributes:
        name: What schemas call it.
        plain: Whether the bytes are those of the values, so that nothing has to be encoded and decoded.
    """

    @property
    def name(self) -> str: ...

    @property
    def plain(self) -> bool: ...

    def size(self, dtype: torch.dtype, numel: int) -> int:
        """How many bytes so many values become: fixed, so that whoever lists the store sees whether an object is whole."""
        ...

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The bytes of a chunk.

        Args:
            values: Flat, contiguous, on the CPU. It is not changed.

        Returns:
            uint8, flat, contiguous, on the CPU; may share memory with ``values``.
        """
        ...

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out`` with the values of a chunk; ``data`` is what :meth:`encode` has returned for them."""
        ...
