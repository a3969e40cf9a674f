"""What DiLoCo does on this machine's GPUs: ``python tools/gpu/check.py``, in under six minutes.

Each case starts two replicas (:mod:`worker`) that meet in a folder in memory, and prints a line:
whether all hold the same bytes and an exported file the same model, how long a step takes and how
much longer it takes while a delayed sync is under way, where the time of the last sync went, and
how much memory was used. It ends with 1 if bytes differ, a case fails or takes too long.

It needs diloco-core, installed or on PYTHONPATH, and nothing else. With one GPU all processes share
it; with several, each process of a replica has its own. ``--cpu`` runs the same on CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

WORKER = Path(__file__).with_name("worker.py")
REPLICAS = 2
LIMIT = 100.0  # seconds for a case

# What a case differs in from the first one: options of DiLoCo and connect, and of the trainer.
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, fused, compiled, delay 10": {
        "train": {"bf16": True, "fused": True, "compile": True},
        "outer": {"delay": 10},
    },
    "fp32, delay 10": {"outer": {"delay": 10}},
    "int8, delay 10": {"outer": {"codec": "int8", "delay": 10}},
    "topk64, delay 10": {"outer": {"codec": "topk64", "delay": 10}},
    "e2m1": {"outer": {"codec": "e2m1"}},
    "4 fragments, delay 4, alpha 0.5": {"outer": {"fragments": 4, "delay": 4, "alpha": 0.5}},
    "elastic, delay 10": {"outer": {"delay": 10}, "connect": {"min_replicas": 2}},
    "DDP, 2 processes": {"train": {"processes": 2, "wrap": "ddp"}},
    "FSDP2, 2 processes": {"train": {"processes": 2, "wrap": "fsdp"}},
}


def main() -> int:
    """Run the cases, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="run on CPUs, to try the check itself")
    parser.add_argument("--small", action="store_true", help="a model of 0.1M parameters, not 100M")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="only these, by their first words")
    arguments = parser.parse_args()
    gpus = 0 if arguments.cpu else torch.cuda.device_count()
    if not (gpus or arguments.cpu):
        parser.error("PyTorch sees no GPU here; --cpu runs the check on CPUs")
    wanted = [
        name for name in CASES if not arguments.cases or name.startswith(tuple(arguments.cases))
    ]
    if not wanted:
        parser.error(f"no such case; there are: {'; '.join(CASES)}")
    where = "CPUs" if arguments.cpu else f"{gpus} of {torch.cuda.get_device_name()}"
    print(f"torch {torch.__version__}, {where}, {REPLICAS} replicas\n")
    columns = (
        "case", "same bytes", "step ms", "longer in a sync", "sync s", "exchange s", "wait s",
        "hidden s", "GPU MiB", "host MiB",
    )  # fmt: skip
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    failed = [name for name in wanted if not run(name, CASES[name], gpus, small=arguments.small)]
    if failed:
        print(f"\nFAILED: {'; '.join(failed)}")
    return 1 if failed else 0


def run(name: str, case: dict[str, Any], gpus: int, *, small: bool) -> bool:
    """Run a case and print its line; returns whether all is well."""
    processes = case.get("train", {}).get("processes", 1)
    if case.get("train", {}).get("wrap") == "fsdp" and 0 < gpus < REPLICAS * processes:
        print(f"| {name} | left out: each process needs a GPU of its own | | | | | | | | |")
        return True
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="diloco-gpu-", dir=parent))
    settings = json.dumps({**case, "gpus": gpus, "small": small, "folder": str(folder)})
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), settings],
            env=_environment(rank, process, processes),
            stderr=(folder / f"errors-{rank}-{process}").open("w"),
        )
        for rank in range(REPLICAS)
        for process in range(processes)
    ]
    try:
        statuses = [each.wait(LIMIT) for each in started]
        if any(statuses):
            raise RuntimeError(f"exit statuses {statuses}")
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("result-*.json"))]
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        errors = [path.read_text()[-1500:] for path in sorted(folder.glob("errors-*"))]
        print(f"| {name} | FAILED: {error} |", *errors, sep="\n")
        return False
    finally:
        for each in started:
            each.kill()
            each.wait()
        shutil.rmtree(folder, ignore_errors=True)
    return show(name, found)


def _environment(rank: int, process: int, processes: int) -> dict[str, str]:
    """The variables that a launcher and torchrun set."""
    variables = {"REPLICA_RANK": str(rank), "REPLICA_WORLD_SIZE": str(REPLICAS)}
    if processes > 1:
        variables |= {
            "RANK": str(process),
            "LOCAL_RANK": str(process),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "localhost",
        }
    return {**os.environ, **variables}


def show(name: str, found: list[dict[str, Any]]) -> bool:
    """Print the line of a case; returns whether its replicas hold the same bytes."""
    same = len({each["digest"] for each in found} | {found[0]["exported"]}) == 1
    first = found[0]
    step = statistics.median(first["alone"] or first["syncing"])
    both = first["alone"] and first["syncing"]
    syncing = statistics.median(first["syncing"]) / step if both else None
    report = first["report"]
    print(
        f"| {name} | {'yes' if same else 'NO'} | {1000 * step:.1f} "
        f"| {'' if syncing is None else f'{syncing:.3f}'} "
        f"| {report['exposed_seconds'] + report['hidden_seconds']:.3f} "
        f"| {report['exchange_seconds']:.3f} | {report['wait_seconds']:.3f} "
        f"| {report['hidden_seconds']:.3f} | {first['gpu_bytes'] / 2**20:.0f} "
        f"| {first['host_bytes'] / 2**20:.0f} |",
        flush=True,
    )
    return same


if __name__ == "__main__":
    sys.exit(main())
