"""The text that the proof learns: Python's standard library, which every machine has."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

_LEFT_OUT = frozenset({"idle_test", "site-packages", "test", "tests", "__pycache__"})
_HELD_OUT = 16  # one file of so many is for validation


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to train on, a part for every replica, and bytes that no replica trains on.

    Attributes:
        parts: For every replica the bytes of its own files, as uint8.
        validation: Bytes of other files, as uint8.
        digest: Tells whether two machines have the same text, which depends on Python's version.
    """

    parts: tuple[torch.Tensor, ...]
    validation: torch.Tensor
    digest: str

    @property
    def size(self) -> int:
        """How many bytes there are to train on."""
        return sum(len(part) for part in self.parts)


def standard_library(replicas: int, most: int | None = None) -> Text:
    """The text, cut for so many replicas.

    Files are ordered by their path, so that each replica has packages of its own, and its text
    differs from that of the others.

    Args:
        replicas: How many parts there are.
        most: Use only the first so many bytes of each part, and of the validation's.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not _LEFT_OUT.intersection(path.relative_to(root).parts)
    )
    contents = [path.read_bytes() for path in files]
    held_out = b"".join(contents[::_HELD_OUT])
    training = b"".join(content for number, content in enumerate(contents) if number % _HELD_OUT)
    size = len(training) // replicas
    parts = [training[rank * size : (rank + 1) * size][:most] for rank in range(replicas)]
    digest = hashlib.sha256(b"".join([*parts, held_out[:most]])).hexdigest()[:16]
    return Text(tuple(map(_tensor, parts)), _tensor(held_out[:most]), digest)


def windows(text: torch.Tensor, count: int, length: int, random: torch.Generator) -> torch.Tensor:
    """Return ``count`` windows of ``length + 1`` bytes from random places.

    They are int64 of the shape (count, length + 1).
    """
    starts = torch.randint(len(text) - length, (count, 1), generator=random)
    return text[starts + torch.arange(length + 1)].long()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
