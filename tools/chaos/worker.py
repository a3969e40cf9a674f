"""One replica of the chaos run: a small classifier of handwritten digits, trained until the run has made its syncs."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import xxhash
from sklearn.datasets import load_digits

from diloco_core import DiLoCo, connect

TRAINING = 1400


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """All images and labels, shuffled the same way everywhere."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def make_model() -> torch.nn.Sequential:
    """64-64-10, with the same initial values everywhere."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


class Batches:
    """Batches drawn with replacement from a rank's part of the training set; a position to be saved."""

    def __init__(self, rank: int, world_size: int) -> None:
        images, labels = data()
        self._images, self._labels = images[rank:TRAINING:world_size], labels[rank:TRAINING:world_size]
        self._rank, self._position = rank, 0

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next batch."""
        generator = torch.Generator().manual_seed(1_000_003 * self._rank + self._position)
        self._position += 1
        chosen = torch.randint(len(self._labels), (16,), generator=generator)
        return self._images[chosen], self._labels[chosen]

    def state_dict(self) -> dict[str, int]:
        """Where it is."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self._position = state["position"]


def main(uri: str, rank: int, world_size: int, syncs: int, step_seconds: float, grace: float, log: Path) -> None:
    """Train, and leave a line per sync."""
    torch.set_num_threads(1)
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(rank, world_size)
    exchange = connect(
        uri, rank=rank, world_size=world_size, min_replicas=2, grace=grace, sync_timeout=120.0, topology="sharded"
    )
    with log.open("a", buffering=1) as lines:

        def seen(report: object) -> None:
            digest = xxhash.xxh3_64()
            for fragment in outer.state_dict()["fragments"]:
                for copy in fragment["copy"]:
                    digest.update(copy.numpy().tobytes())
            extra = {"time": time.time(), "rank": rank, "pid": os.getpid(), "digest": digest.hexdigest()}
            lines.write(report.to_json(**extra) + "\n")  # type: ignore[attr-defined]

        outer = DiLoCo(
            model,
            inner,
            exchange,
            sync_every=10,
            stateful={"batches": batches},
            save_inner_every=2,
            on_sync=seen,
        )
        with outer:
            for _ in range(outer.batches_to_skip):
                next(batches)
            while outer.committed < syncs:
                images, labels = next(batches)
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                inner.step()
                inner.zero_grad()
                time.sleep(step_seconds)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    main(log=Path(arguments.pop("log")), **arguments)
