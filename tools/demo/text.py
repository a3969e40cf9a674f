"""The text of the demo: Python's own standard library, which every machine that runs this has."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

# Tests and what others have installed differ from machine to machine.
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
MINIMUM_BYTES = 2_000_000


def library_files() -> list[Path]:
    """The sources of the standard library, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(
        path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts)
    )


def prepare(folder: Path, replicas: int, seed: int) -> dict[str, int]:
    """Write ``train-<rank>.bytes`` and ``valid.bytes``; no byte of a source file is in two of them.

    Every tenth file is held out for validation; the others are joined and cut into one part per
    replica.

    Args:
        folder: Where to.
        replicas: How many parts.
        seed: Of the order of the files.

    Returns:
        Size in bytes of each file written.
    """
    files = library_files()
    random.Random(seed).shuffle(files)
    held_out = b"\n".join(path.read_bytes() for path in files[::10])
    rest = b"\n".join(path.read_bytes() for number, path in enumerate(files) if number % 10)
    if len(rest) < MINIMUM_BYTES:
        raise SystemExit(
            f"the sources of Python's standard library are missing here: only {len(rest)} bytes in "
            f"{sysconfig.get_path('stdlib')}. Use a Python that comes with them."
        )
    folder.mkdir(parents=True)
    parts = {
        f"train-{rank}.bytes": rest[
            len(rest) * rank // replicas : len(rest) * (rank + 1) // replicas
        ]
        for rank in range(replicas)
    }
    parts["valid.bytes"] = held_out
    for name, data in parts.items():
        (folder / name).write_bytes(data)
    return {name: len(data) for name, data in parts.items()}
