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

_ALIGNED = 16  # bytes: each tensor begins at a multiple of that
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
    hosts = inside.collect(host_name())
    if len(different := sorted(set(hosts))) > 1:
        raise ConfigurationError(
            f"the processes of this replica are on several machines ({', '.join(different)}), and "
            "those of one replica share memory: start a replica on each machine"
        )
    with _file(size) if inside.leads else nullcontext(("", b"")) as (place, token):
        place, token = inside.share((place, token))
        flat = inside.together(partial(_mapped, place, size, token))
    return [_at(flat, start, tensor) for start, tensor in zip(starts, tensors, strict=True)]


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


def _mapped(place: str, size: int, token: bytes) -> torch.Tensor:
    try:
        with Path(place).open("r+b", buffering=0) as file:
            # Whatever else there may be under this path, it does not end like that.
            if os.pread(file.fileno(), _TOKEN_BYTES + 1, size) != token:
                raise OSError(f"{place} is not the leader's file")
            memory = mmap.mmap(file.fileno(), size + _TOKEN_BYTES)
    except OSError as error:
        raise ConfigurationError(
            f"the processes of this replica cannot share memory ({error}): they must run as the "
            "same user, in the same container"
        ) from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def _at(flat: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor at a place of the memory; it counts writes for itself, unlike a view."""
    strides = torch.empty(like.shape, device="meta").stride()
    tensor = torch.empty(0, dtype=like.dtype, device="cpu").set_(
        flat.untyped_storage(), start // like.element_size(), like.shape, strides
    )
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, like.requires_grad)
    return tensor
