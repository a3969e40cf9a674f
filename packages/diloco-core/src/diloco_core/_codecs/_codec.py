"""The interface of codecs, and what is asked of those with which state is published."""

from __future__ import annotations

from typing import Protocol

import torch

from .._checks import whole
from .._errors import ConfigurationError


def is_sparse(codec: Codec) -> bool:
    """Say whether values that decode to zero were not sent."""
    return bool(getattr(codec, "sparse", False))


class Codec(Protocol):
    """Encodes the values that take an outer step.

    All replicas of a run use the same codec: schemas name it, and are compared.

    All replicas, including the sender, add up what :meth:`decode` returns, so they agree even if a
    codec loses precision. A codec sees one chunk at a time. Each replica chooses its own chunk size
    (a multiple of 16 elements and of ``block``, except for the last chunk of a shard), so the bytes
    of a shard must be the same however it is cut. The same bytes must become the same values on
    every machine. Thread-safe. :class:`diloco_core.testing.CodecConformance` tests all this.

    Attributes:
        name: The codec's name in schemas. It has to tell apart all codecs that encode differently.
        plain: Whether the encoded bytes are those of the values in memory, so that encoding and
            decoding can be skipped.
        block: The number of elements that are encoded together, such as those that share a scale; 1
            if there are none.

    A codec may also have an attribute ``sparse``, which is False if it is missing. If it is True,
    most values decode to zero, which stands for "not sent": the mean of contributions is, for each
    element, that of those in which it is not zero. What was not sent has to be sent later, so such
    a codec is used with error feedback, by default with a decay of 0.95.
    """

    @property
    def name(self) -> str: ...

    @property
    def plain(self) -> bool: ...

    @property
    def block(self) -> int: ...

    def size(self, dtype: torch.dtype, numel: int) -> int:
        """The number of bytes that ``numel`` values become.

        It is fixed, so a listing shows whether an object is complete.
        """

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Encode a chunk.

        Args:
            values: Flat, contiguous, on the CPU, float32 or float64. They are finite, and must not
                be changed.

        Returns:
            uint8, flat, contiguous, on the CPU; may share memory with ``values``.
        """

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out`` with the values of a chunk, all of them finite.

        ``data`` is what :meth:`encode` returned for the chunk.
        """


def check_state_codec(codec: Codec, *, gather: bool) -> None:
    """Refuse a codec for state that cannot do it.

    Args:
        codec: The codec; a plain one changes nothing.
        gather: Whether the topology is ``gather``.

    Raises:
        ConfigurationError: It is sparse, or state is not published in every sync.
    """
    if codec.plain:
        return
    if gather:
        raise ConfigurationError(
            f"state_codec={codec.name!r} cannot be used with topology='gather', in which only a "
            "few syncs publish their state: use topology='sharded', or leave state_codec out"
        )
    if is_sparse(codec):
        raise ConfigurationError(
            f"state_codec={codec.name!r} sends only a few of the values, so most changes of the "
            "model would come many syncs late. Choose a codec that sends all of them, such as "
            "'int8'; codec, which encodes contributions, can be sparse"
        )


def whole_state_every(codec: Codec, given: object) -> int:
    """Return the number of syncs of a fragment from one whole publication of its state to the next.

    Args:
        codec: The codec for state.
        given: The option; None if it was left out.

    Raises:
        ConfigurationError: It was given without a codec for state, or is not a number of syncs.
    """
    if codec.plain and given is not None:
        raise ConfigurationError(
            f"full_state_every={given!r} needs a state_codec: without one, the whole state is "
            "published in every sync"
        )
    return whole("full_state_every", 8 if given is None else given)
