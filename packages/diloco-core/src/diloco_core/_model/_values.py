"""The tensors of a model that are not synced, and values as bytes and checksums."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import xxhash

from .._checks import kind_of
from .._wire._sections import view
from ._names import plain_name

if TYPE_CHECKING:
    from collections.abc import Collection

_log = logging.getLogger("diloco_core")

# Number of elements that are hashed at once: tensors on another device are copied in pieces of this size.
_HASHED_AT_ONCE = 2**22


def describe(dtype: torch.dtype, shape: torch.Size) -> str:
    """A dtype and a shape as text, such as ``float32[2, 3]``."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def named_buffers(model: torch.nn.Module, *, persistent: bool) -> dict[str, torch.Tensor]:
    """The buffers that are saved with a model, or those that are not, under all of their names."""
    buffers: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        # torch has no public way to ask which are persistent.
        not_persistent = module._non_persistent_buffers_set  # noqa: SLF001
        for name, buffer in module._buffers.items():  # noqa: SLF001
            if buffer is not None and (name not in not_persistent) == persistent:
                buffers[f"{prefix}.{name}" if prefix else name] = buffer
    return buffers


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor as bytes: inner state holds only tensors of some dtypes, and a buffer may have any."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def compared_tensors(
    model: torch.nn.Module, frozen: Collection[str], sums: dict[int, str | None] | None = None
) -> dict[str, str]:
    """Describe the tensors that are never synced but must be equal at all replicas.

    These are frozen parameters, and buffers that are not saved. Their values are read once; only small pieces are copied.

    Args:
        model: The model.
        frozen: Names of the parameters that are not synced.
        sums: Is filled with the checksums, by the ``id`` of the tensor; checksums that it holds already are used.

    Returns:
        The description of each tensor, with a checksum of its values, by its name.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    synced = {id(tensor) for tensor in named_buffers(model, persistent=True).values()}
    sums = {} if sums is None else sums
    lines = {}
    for kind, tensors in (
        ("frozen", {name: parameters[name] for name in frozen}),
        ("not persistent", named_buffers(model, persistent=False)),
    ):
        for name, tensor in tensors.items():
            if id(tensor) in synced:
                continue
            if id(tensor) not in sums:
                sums[id(tensor)] = checksum(tensor)
            values = sums[id(tensor)]
            if values is None:
                _log.warning(
                    "the values of %r, %s, cannot be compared between the replicas: make sure that they are the same everywhere",
                    name,
                    kind_of(tensor),
                )
            lines[plain_name(model, name)] = f"{describe(tensor.dtype, tensor.shape)} {kind}" + (
                f" with values {values}" if values else ""
            )
    return lines


def checksum(tensor: torch.Tensor) -> str | None:
    """The xxh3-64 of a tensor's values in row-major order; None for kinds of tensors whose values cannot be read this way."""
    digest = xxhash.xxh3_64()
    return digest.hexdigest() if _feed(digest, tensor.detach()) else None


def _feed(digest: xxhash.xxh3_64, tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__"):
        # It consists of several tensors, as quantized weights do.
        names, _ = tensor.__tensor_flatten__()
        return all([_feed(digest, getattr(tensor, name).detach()) for name in names])  # noqa: C419 - feed all of them
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    try:
        flat = tensor.reshape(-1)
        if tensor.is_complex():
            flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
        for start in range(0, flat.numel(), _HASHED_AT_ONCE):
            piece = flat[start : start + _HASHED_AT_ONCE].contiguous().cpu()
            digest.update(view(piece.view(torch.uint8)))
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True
