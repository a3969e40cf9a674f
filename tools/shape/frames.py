"""Print the frames from the hook of the inner optimizer to the store's put, outermost first.

A fixed run of two replicas over a folder, without a delay. Each kind of object that is written
during a step is listed once, with the number of frames: those of the hook and of the store's own
method count.

    python tools/shape/frames.py
"""

from __future__ import annotations

import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diloco_core import DiLoCo, connect
from diloco_core._store._drivers._folder import FolderStore
from diloco_core.testing import run_replicas

HOOK = "untraced_hook"


def recorded() -> dict[str, list[traceback.FrameSummary]]:
    """Train, and return the frames above the first write of each kind of object, by its folder."""
    stacks: dict[str, list[traceback.FrameSummary]] = {}
    lock = threading.Lock()

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def write(store: FolderStore, key: str, *arguments: Any) -> Any:
            frames = traceback.extract_stack()
            hooks = [place for place, frame in enumerate(frames) if frame.name == HOOK]
            kind = key.split("/")[0]
            if hooks and "/" in key:
                with lock:
                    stacks.setdefault(kind, frames[hooks[-1] :])
            return method(store, key, *arguments)

        return write

    def train(exchange: Any) -> None:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCo(model, optimizer, exchange, sync_every=2):
            for _ in range(2):
                model(torch.ones(3)).sum().backward()
                optimizer.step()

    methods = {name: getattr(FolderStore, name) for name in ("put", "create")}
    for name, method in methods.items():
        setattr(FolderStore, name, watched(method))
    try:
        with tempfile.TemporaryDirectory() as folder:
            exchanges = [connect(folder, rank=rank, world_size=2) for rank in range(2)]
            for result in run_replicas(train, exchanges):
                if isinstance(result, BaseException):
                    raise result
    finally:
        for name, method in methods.items():
            setattr(FolderStore, name, method)
    return stacks


def main() -> None:
    """Print the frames."""
    here = str(Path(sys.modules["diloco_core"].__file__ or "").parent)
    for kind, frames in recorded().items():
        print(f"{kind}: {len(frames)} frames")
        for frame in frames[:-1]:
            print(
                f"    {frame.filename.removeprefix(here).lstrip('/')}:{frame.lineno} {frame.name}"
            )
        print("    the store")


if __name__ == "__main__":
    main()
