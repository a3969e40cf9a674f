"""Damage at rest: while no replica lives, an object of the newest state is changed or lost."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from history import History

_DONE = re.compile(r"state/(\d{8})/(\d{3})\.done\.json", re.ASCII)


class Shelf(Protocol):
    """The objects of a run as whoever owns the disk can get at them."""

    def listing(self) -> list[str]:
        """All keys."""
        ...

    def read(self, key: str) -> bytes:
        """An object."""
        ...

    def write(self, key: str, data: bytes | None) -> None:
        """Put other bytes in its place, or nothing."""
        ...


@dataclass
class FolderShelf:
    """The objects of a folder.

    Attributes:
        folder: The run's folder.
    """

    folder: Path

    def listing(self) -> list[str]:
        """All keys."""
        files = (
            path
            for path in self.folder.rglob("*")
            if path.is_file() and not path.name.startswith(".")
        )
        return sorted(path.relative_to(self.folder).as_posix() for path in files)

    def read(self, key: str) -> bytes:
        """An object."""
        return (self.folder / key).read_bytes()

    def write(self, key: str, data: bytes | None) -> None:
        """Put other bytes in its place, or nothing."""
        if data is None:
            (self.folder / key).unlink()
        else:
            draft = self.folder / ".draft"  # in one step, or the watcher would see half of it
            draft.write_bytes(data)
            draft.replace(self.folder / key)


@dataclass
class BucketShelf:
    """The objects of a small S3.

    Attributes:
        objects: Its objects, by key.
        prefix: Where the run lies, with ``/`` at the end.
    """

    objects: dict[str, bytes]
    prefix: str

    def listing(self) -> list[str]:
        """All keys."""
        return sorted(
            key.removeprefix(self.prefix)
            for key in list(self.objects)
            if key.startswith(self.prefix)
        )

    def read(self, key: str) -> bytes:
        """An object."""
        return self.objects[self.prefix + key]

    def write(self, key: str, data: bytes | None) -> None:
        """Put other bytes in its place, or nothing."""
        if data is None:
            del self.objects[self.prefix + key]
        else:
            self.objects[self.prefix + key] = data


@dataclass
class Damage:
    """Damages one repairable object of the newest complete state, its sync's records included.

    Attributes:
        shelf: Where the objects lie.
        history: Is told, so that it does not wonder.
        chance: Chooses object and damage.
        counts: How often what was damaged in which way.
    """

    shelf: Shelf
    history: History
    chance: random.Random
    counts: dict[str, int] = field(default_factory=dict)

    def strike(self) -> None:
        """Damage one object. Nobody may live meanwhile."""
        keys = self.shelf.listing()
        newest = max((key for key in keys if _DONE.fullmatch(key)), default=None)
        if newest is None:
            return
        folder, _, name = newest.rpartition("/")
        shards = [
            key
            for key in keys
            if key.startswith(f"{folder}/{name[:3]}.") and key.endswith(".safetensors")
        ]
        kinds = {
            "done": [newest],
            "commit": [f"commits/{folder.removeprefix('state/')}.json"],
            "shard": shards,
        }
        kind = self.chance.choice(sorted(kinds))
        key = self.chance.choice(kinds[kind])
        data = self.shelf.read(key)
        how = self.chance.choice(["flipped", "cut", "lost"])
        if how == "lost":
            damaged = None
        elif how == "cut":
            damaged = data[: self.chance.randrange(len(data))]
        else:
            flipped = bytearray(data)
            flipped[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
            damaged = bytes(flipped)
        self.history.excuse(key, data, damaged)
        self.shelf.write(key, damaged)
        self.counts[f"{kind} {how}"] = self.counts.get(f"{kind} {how}", 0) + 1
