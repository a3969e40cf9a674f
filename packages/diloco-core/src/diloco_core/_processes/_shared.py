"""Memory that the processes of a replica share, for the whole values of their model's tensors."""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch

from .._errors import ConfigurationError
from .._host import host_name
from ._inside import Inside

_ALIGNED = 64  # bytes: each tensor begins at a multiple of that, as torch's own do
_TOKEN_BYTES = 16


def shared_values(inside: Inside, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return memory for the whole values of each tensor, on the CPU; the same on every process.

    It is zero at first. All processes call this together.

    Raises:
        ConfigurationError: They are on several machines, or cannot share memory.
    """
    rooms = [-(-each.numel() * each.element_size() // _ALIGNED) * _ALIGNED for each in tensors]
    starts = list(itertools.accumulate(rooms, initial=0))
    size = starts.pop()
    if len(hosts := sorted(set(inside.collect(host_name())))) > 1:
        raise ConfigurationError(
            f"the processes of this replica are on several machines ({', '.join(hosts)}), and "
            "those of one replica share memory: start a replica on each machine"
        )
    with _file(size) if inside.leads else nullcontext(("", b"")) as (place, token):
        place, token = inside.share((place, token))
        memory = inside.together(partial(_mapped, place, size, token))
    return [_at(memory, start, tensor) for start, tensor in zip(starts, tensors, strict=True)]


@contextmanager
def _file(size: int) -> Iterator[tuple[str, bytes]]:
    """A file in memory, which is gone once nobody maps it; its path, and how it ends."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("diloco")
        place = f"/proc/{os.getpid()}/fd/{number}"
    else:
        number, place = tempfile.mkstemp(prefix="diloco-")
    try:
        os.ftruncate(number, size)
        os.pwrite(number, token, size)
        yield place, token
    finally:
        os.close(number)
        if not place.startswith("/proc/"):
            Path(place).unlink()


def _mapped(place: str, size: int, token: bytes) -> mmap.mmap:
    try:
        with Path(place).open("r+b", buffering=0) as file:
            # Whatever else there may be under this path, it does not end like that.
            if os.pread(file.fileno(), _TOKEN_BYTES + 1, size) != token:
                raise OSError(f"{place} is not the leader's file")
            return mmap.mmap(file.fileno(), size + _TOKEN_BYTES)
    except OSError as error:
        raise ConfigurationError(
            f"the processes of this replica cannot share memory ({error}): they must run as the "
            "same user, in the same container"
        ) from error


def _at(memory: mmap.mmap, start: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor at a place of the memory; it counts writes for itself."""
    # Torch refuses to make an empty one.
    values = torch.frombuffer(memory, dtype=like.dtype, count=like.numel() or 1, offset=start)
    tensor = values[: like.numel()].view(like.shape)
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, like.requires_grad)
    return tensor
