"""Whole values of the tensors of a replica: taken from all of its processes, and given to all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .._model._values import part_here, sample
from ._inside import Inside
from ._moves import Mail

_MOST = 16  # values of each tensor that are compared
_MOST_OF_ALL = 256  # of all tensors, unless these are more: a short message carries them
_Chunk = tuple[tuple[int, int], ...]  # in every dimension: where it begins, and where it ends


class Held(NamedTuple):
    """What this process holds of a tensor of the model.

    Attributes:
        tensor: The tensor; of a DTensor, a part is here.
        whole: Its whole values in the memory that the processes share.
        here: Where the part lies in them.
        gives: Whether this process writes them there, and no other that holds the same.
    """

    tensor: torch.Tensor
    whole: torch.Tensor
    here: _Chunk
    gives: bool

    @property
    def is_trained(self) -> bool:
        """Say whether it is a parameter that was trained at first; it may be frozen for a time."""
        return self.whole.requires_grad

    @property
    def is_synced(self) -> bool:
        """Say whether it is such a parameter, or a buffer."""
        return self.is_trained or not isinstance(self.whole, torch.nn.Parameter)


Now: TypeAlias = Callable[[], Sequence[Held]]
"""Returns all of it, as it is when a process has to read or write it."""


def held_tensors(
    inside: Inside, tensors: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor]
) -> list[Held]:
    """Return what this process holds of each tensor. All processes call this together."""
    chunks = [_chunk(tensor) for tensor in tensors]
    loads = [0] * inside.processes
    held = []
    told = zip(*inside.collect(chunks), strict=True)
    for tensor, whole, mine, of_all in zip(tensors, wholes, chunks, told, strict=True):
        givers = {}
        for chunk in dict.fromkeys(of_all):
            alike = [process for process, theirs in enumerate(of_all) if theirs == chunk]
            # Buffers may differ between processes; parameters do not, so these share the work.
            shared = isinstance(tensor, torch.nn.Parameter)
            givers[chunk] = giver = min(alike, key=loads.__getitem__) if shared else alike[0]
            loads[giver] += whole.nbytes
        held.append(Held(tensor, whole, mine, givers[mine] == inside.process))
    return held


def _chunk(tensor: torch.Tensor) -> _Chunk:
    values = tensor.detach()
    if not isinstance(values, DTensor):
        return tuple((0, size) for size in values.shape)
    # Not by redistribute(), which does not offer the layout in which a dimension is cut twice.
    (chunk,) = values.__create_chunk_list__()  # type: ignore[no-untyped-call] # so in torch
    return tuple((at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))


def reshard(model: torch.nn.Module) -> None:
    """Have every parameter of FSDP modules be the part of this process again.

    After a forward pass without a backward pass they are whole, and what is written into the parts
    would not be seen.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def samples(held: Sequence[Held]) -> dict[int, list[float]]:
    """Return some values of the trained tensors that all processes hold alike, by number."""
    alike = {
        number: each.tensor
        for number, each in enumerate(held)
        if each.is_trained and not isinstance(each.tensor, DTensor)
    }
    most = min(_MOST, max(1, _MOST_OF_ALL // max(1, len(alike))))
    return {number: sample(tensor, most).tolist() for number, tensor in alike.items()}


@torch.no_grad()
def spread(
    inside: Inside,
    now: Now,
    new: Sequence[int],
    wanted: Sequence[int] = (),
    mail: Callable[[], Mail] | None = None,
) -> list[Mail | None]:
    """Spread new values, and gather others, in shared memory. All processes call this together.

    Args:
        inside: The processes.
        now: Returns what this one holds of the tensors.
        new: The numbers of tensors of which all take the values that are there.
        wanted: The numbers of others, whose values all write there.
        mail: Returns what this process has for the leader, if that asks for it.

    Returns:
        The mail of every process.
    """

    def act() -> Mail | None:
        held = now()
        for each in map(held.__getitem__, new):
            each.tensor.grad = None  # it was computed with the old values
            part_here(each.tensor.detach()).copy_(_part(each))
        for each in map(held.__getitem__, wanted):
            if each.gives:
                _part(each).copy_(part_here(each.tensor.detach()))
        return None if mail is None else mail()

    return inside.each(act)  # the leader goes on only when all have read and written


def _part(held: Held) -> torch.Tensor:
    """What of the whole values is here."""
    return held.whole[tuple(slice(start, stop) for start, stop in held.here)]
