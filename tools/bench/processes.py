"""What it costs that a replica is several processes: ``hatch run bench-processes``.

* The time of a sync of one replica that is two processes, with DDP and with FSDP2, beside that of a
  replica of one process with the same model and store. One replica trains at a time, and the
  contenders take turns. Over a store that speaks S3 on a loopback port (moto), as real runs use
  one, the goals are 1.15 times and 1.3 times. Over a folder in memory there is no goal: all that a
  sync does there is to copy in memory, so the one or two copies between the processes weigh more
  than over any store that replicas can share.
* The time in which the leader gives values to both processes, beside that of a copy of the same
  bytes in memory. Goal: twice.
* What a step costs more inside the block than outside, far from a sync. Goal: 5 microseconds.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from s3 import s3_server
from torch import distributed
from worker import make_model

from diloco_core import DiLoCo, connect
from diloco_core._processes._inside import Inside
from diloco_core._processes._shared import shared_values
from diloco_core._processes._values import held_tensors, spread

KINDS = {"plain": 1, "ddp": 2, "fsdp": 2}
WARM_UP = 3


def main() -> int:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=25_000_000, help="fp32 parameters")
    parser.add_argument("--rounds", type=int, default=5, help="turns of the contenders")
    parser.add_argument("--syncs", type=int, default=6, help="counted syncs in each turn")
    parser.add_argument("--store", help="a URI to measure over, instead of the two stores")
    parser.add_argument("--worker", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker[0], Path(arguments.worker[1]), arguments)
        return 0
    print(f"{4 * arguments.parameters / 1e6:.0f} MB of parameters")
    if arguments.store:
        rounds = compare(f"over {arguments.store}", arguments)
    else:
        with s3_server():
            compare("over S3 on loopback", arguments, "s3://bucket")
        rounds = compare("over a folder in memory", arguments)
    ratio = statistics.median(each["ddp"]["spread"] / each["ddp"]["copy"] for each in rounds)
    print(f"values to both processes: {ratio:.2f} x a copy in memory (goal: 2)")
    micros = statistics.median(1e6 * each["ddp"]["step"] for each in rounds)
    print(f"a step far from a sync: {micros:.1f} microseconds more than outside (goal: 5)")
    return 0


def compare(
    where: str, arguments: argparse.Namespace, store: str | None = None
) -> list[dict[str, Any]]:
    """Let the contenders take turns over a store; print the ratios, and return all measured."""
    rounds = [{k: run(k, arguments, store) for k in KINDS} for _ in range(arguments.rounds)]
    has_goals = (store or arguments.store or "").startswith("s3://")
    for kind, goal in (("ddp", 1.15), ("fsdp", 1.3)):
        ratio = statistics.median(
            statistics.median(each[kind]["syncs"]) / statistics.median(each["plain"]["syncs"])
            for each in rounds
        )
        said = f" (goal: {goal})" if has_goals else ""
        print(f"{where}, {kind}, two processes: {ratio:.2f} x one process{said}")
    seconds = statistics.median(statistics.median(each["plain"]["syncs"]) for each in rounds)
    print(f"{where}, one process: a sync takes {seconds:.3f} s")
    return rounds


def run(kind: str, arguments: argparse.Namespace, store: str | None) -> dict[str, Any]:
    """One turn of a contender; returns what its first process has measured."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="diloco-bench-", dir=parent))
    command = [sys.executable, __file__, "--worker", kind, str(folder)]
    command += ["--parameters", str(arguments.parameters), "--syncs", str(arguments.syncs)]
    if store := store or arguments.store:
        command += ["--store", f"{store.rstrip('/')}/{folder.name}"]
    variables = {"REPLICA_RANK": "0", "REPLICA_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    processes = KINDS[kind]
    started = []
    for process in range(processes):
        if processes > 1:
            variables |= {"RANK": str(process), "WORLD_SIZE": str(processes)}
            variables |= {"LOCAL_WORLD_SIZE": str(processes), "GLOO_SOCKET_IFNAME": "lo"}
        started.append(subprocess.Popen(command, env={**os.environ, **variables}))
    try:
        statuses = [each.wait() for each in started]
        if any(statuses):
            raise SystemExit(f"{kind} has failed")
        return json.loads((folder / "result.json").read_text())  # type: ignore[no-any-return]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def work(kind: str, folder: Path, arguments: argparse.Namespace) -> None:
    """Measure as one process of a contender."""
    process, processes = int(os.environ.get("RANK", "0")), KINDS[kind]
    if processes > 1:
        meeting = f"file://{folder}/meeting"
        distributed.init_process_group(
            "gloo", init_method=meeting, rank=process, world_size=processes
        )
    exchange = connect(arguments.store or folder / "run")
    model: torch.nn.Module = make_model(arguments.parameters)
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    syncs = []
    with DiLoCo(model, optimizer, exchange, sync_every=1, save_inner_every=0):
        for number in range(WARM_UP + arguments.syncs):
            with torch.no_grad():  # what an inner step does to them, outside of what is measured
                for parameter in model.parameters():
                    parameter.sub_(1e-3)
            if processes > 1:
                distributed.barrier()
            start = time.perf_counter()
            optimizer.step()  # without gradients: what is measured is the sync
            if number >= WARM_UP:
                syncs.append(time.perf_counter() - start)
    found: dict[str, object] = {"syncs": syncs}
    if kind == "ddp":
        found |= {"copy": copying(arguments.parameters), "spread": spreading(arguments.parameters)}
        found["step"] = stepping(folder)
    if process == 0:
        (folder / "result.json").write_text(json.dumps(found))
    if processes > 1:
        distributed.destroy_process_group()


def copying(parameters: int) -> float:
    """Seconds for a copy of the values in memory."""
    source, target = torch.zeros(parameters), torch.zeros(parameters)
    return best(lambda: target.copy_(source))


def spreading(parameters: int) -> float:
    """Seconds in which the leader gives values to the other process."""
    inside = Inside(600.0)
    target = torch.zeros(parameters)
    held = held_tensors(inside, [target], shared_values(inside, [target]))
    seconds = best(lambda: spread(inside, lambda: held, [0]))
    inside.close()
    return seconds


def stepping(folder: Path) -> float:
    """Seconds that a step far from a sync takes longer inside the block than outside."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
    (parameter,) = model.parameters()
    parameter.grad = torch.zeros_like(parameter)
    outside = steps(optimizer)
    exchange = connect(folder / "steps")
    logging.disable()  # it would say that the steps below are in no sync
    with DiLoCo(model, optimizer, exchange, sync_every=10**6, flush="none"):
        return steps(optimizer) - outside


def steps(optimizer: torch.optim.Optimizer, number: int = 2000) -> float:
    """Seconds of one step."""

    def many() -> None:
        for _ in range(number):
            optimizer.step()

    return best(many) / number


def best(act: object) -> float:
    """Seconds of the fastest of ten times."""
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        act()  # type: ignore[operator]
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    sys.exit(main())
