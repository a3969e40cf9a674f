"""Whole values of the tensors of a replica: read from all of its processes, and given to all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .._model._values import as_bytes, is_plain
from ._inside import PIECE_BYTES, Inside

_DIRECT_BYTES = 2**20

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""A tensor of the model, and what stands for it in the leader's twin (None elsewhere)."""


def reshard(model: torch.nn.Module) -> None:
    """Have every parameter of FSDP modules be the part of this process again.

    After a forward pass without a backward pass they are whole, and what is written into the parts
    would not be seen.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def gather(pairs: Iterable[Pair]) -> None:
    """Write the whole values of tensors into the leader's twin. All processes call it together.

    It needs memory for one whole tensor on every process.
    """
    problem: Exception | None = None
    for tensor, whole in pairs:
        values = tensor.detach()
        if isinstance(values, DTensor):
            values = values.full_tensor()
        if whole is not None:
            # The others go on to the next tensor, so an error of this process waits.
            try:
                whole.copy_(values)
            except Exception as error:  # noqa: BLE001
                problem = problem or error
    if problem is not None:
        raise problem


@torch.no_grad()
def spread(inside: Inside, pairs: Sequence[Pair]) -> None:
    """Write the values of the leader's twin into all processes' tensors; all call it together.

    The values travel as flat bytes, in pieces of at most :data:`PIECE_BYTES`: small tensors
    together, and a larger one in several. Large tensors on the CPU are written where they lie.
    """
    direct = [pair for pair in pairs if _is_direct(pair[0])]
    for tensor, whole in direct:
        tensor.grad = None  # it was computed with the old values
        values = as_bytes(tensor if whole is None else whole)
        for piece in values.split(PIECE_BYTES):  # type: ignore[no-untyped-call] # so in torch
            inside.broadcast(piece)
        if whole is not None:
            tensor.detach().copy_(whole)
    for batch in _batches([pair for pair in pairs if not _is_direct(pair[0])]):
        ends = list(itertools.accumulate(_room(tensor) for tensor, _ in batch))
        flat = inside.buffer(ends[-1])
        parts = [
            flat[end - _room(tensor) :][: tensor.numel() * tensor.element_size()]
            .view(tensor.dtype)
            .view(tensor.shape)
            for end, (tensor, _) in zip(ends, batch, strict=True)
        ]
        for part, (_, whole) in zip(parts, batch, strict=True):
            if whole is not None:
                part.copy_(whole)
        for piece in flat.split(PIECE_BYTES):  # type: ignore[no-untyped-call] # so in torch
            inside.broadcast(piece)
        for part, (tensor, _) in zip(parts, batch, strict=True):
            write(tensor, part)


def _is_direct(tensor: torch.Tensor) -> bool:
    """Say whether values can be received into a tensor itself, and it is large enough for that."""
    size = tensor.numel() * tensor.element_size()
    plain = is_plain(tensor) and tensor.device.type == "cpu" and tensor.is_contiguous()
    return plain and size >= _DIRECT_BYTES


def write(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Replace the part of a tensor that this process holds, by that of its whole values."""
    tensor.grad = None  # it was computed with the old values
    values = tensor.detach()
    if not isinstance(values, DTensor):
        values.copy_(whole)
        return
    # Which part of the whole is here: also where one dimension is cut twice (tensor parallel and
    # sharded), where redistributing replicated values is not offered.
    local = values.to_local()
    for chunk in values.__create_chunk_list__():  # type: ignore[no-untyped-call] # so in torch
        here = tuple(
            slice(start, start + size)
            for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
        )
        local.copy_(whole[here])


def _room(tensor: torch.Tensor) -> int:
    """Bytes of the whole values in a flat buffer, in which each begins at a multiple of 16."""
    return -(-tensor.numel() * tensor.element_size() // 16) * 16


def _batches(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Yield tensors that fit into one piece together, or a larger one by itself."""
    batch: list[Pair] = []
    room = PIECE_BYTES
    for pair in pairs:
        size = _room(pair[0])
        if batch and size > room:
            yield batch
            batch, room = [], PIECE_BYTES
        batch.append(pair)
        room -= size
    if batch:
        yield batch
