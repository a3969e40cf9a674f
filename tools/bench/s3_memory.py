"""One replica of a run over S3, whose peak memory is printed in bytes; started by ``s3.py``."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import torch
from worker import make_model

from diloco_core import DiLoCo, connect

SYNCS = 3


def train(uri: str, kind: str, rank: int, replicas: int, parameters: int, syncs: int) -> None:
    """A whole run: begin, some syncs, and leave."""
    options: dict[str, Any] = (
        {} if kind == "fixed" else {"min_replicas": replicas, "topology": kind}
    )
    model = make_model(parameters)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)  # without gradients: a step changes nothing
    exchange = connect(uri, rank=rank, world_size=replicas, **options)
    with DiLoCo(model, inner, exchange, sync_every=1, save_inner_every=0):
        for _ in range(syncs):
            with torch.no_grad():
                for tensor in model:
                    tensor.mul_(0.999)
            inner.step()


def peak_bytes() -> int:
    """The largest resident memory that this process has had."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage() would tell of the process that this one was forked from, too
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return 1024 * int(lines["VmHWM"].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Run a small model, so that all is imported and open, and then the one that is measured."""
    uri, kind, (rank, replicas, parameters) = sys.argv[1], sys.argv[2], map(int, sys.argv[3:])
    torch.set_num_threads(1)
    train(f"{uri}/warm", kind, rank, replicas, 1000, 1)
    before = peak_bytes()
    train(f"{uri}/run", kind, rank, replicas, parameters, SYNCS)
    print(peak_bytes() - before)


if __name__ == "__main__":
    main()
