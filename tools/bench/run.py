"""The outer step against its peers, as ratios of interleaved rounds: ``hatch run bench``.

Starts N worker processes (:mod:`worker`) on this machine, each with one thread. Every round runs
every contender once, in turn, so that a noisy machine disturbs all alike; what is printed is the
median of the ratios round by round.

The input/output floor is the same bytes, written and read with plain system calls and no
arithmetic: into fresh files, which the system must find pages for, and into files that exist, as
our driver does from the third sync on. It is written from, and read into, a buffer that stays in
the processor's cache; once more with the values themselves, which do not fit there.

At the end it prints what it costs that a replica is several processes (:mod:`processes`).
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

from diloco_core import StoreModel, plan_exchange

HERE = Path(__file__).parent
MIB = 2**20


def main() -> int:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--replicas", type=int, nargs="+", default=[4, 2], help="numbers of replicas (default: 4 2)"
    )
    parser.add_argument(
        "--parameters", type=int, default=25_000_000, help="fp32 parameters (default: 25 million)"
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="counted rounds, after one to warm up (default: 7)"
    )
    parser.add_argument(
        "--folder",
        help="where the replicas meet (default: a memory-backed folder, else a temporary one)",
    )
    parser.add_argument(
        "--no-memory", action="store_true", help="leave out the measurement of peak memory"
    )
    parser.add_argument(
        "--no-processes", action="store_true", help="leave out replicas of several processes"
    )
    arguments = parser.parse_args()
    print(
        f"{arguments.parameters:,} fp32 parameters, {os.cpu_count()} cores, one thread per replica"
    )
    print(f"medians of {arguments.rounds} rounds")
    for replicas in arguments.replicas:
        timings = _run("times", replicas, arguments)
        _print_times(replicas, timings)
        _print_copies(timings, arguments.parameters)
        _print_plan(replicas, timings, arguments.parameters)
        if not arguments.no_memory:
            _print_memory(replicas, arguments)
    print(
        f"\nimport diloco_protocol: {_import_milliseconds():.0f} ms over a bare interpreter (goal: "
        "< 50)\n",
        flush=True,
    )
    if arguments.no_processes:
        return 0
    command = [sys.executable, str(HERE / "processes.py")]
    command += [f"--parameters={arguments.parameters}", f"--rounds={arguments.rounds}"]
    return subprocess.run(command, check=False).returncode


def _run(what: str, replicas: int, arguments: argparse.Namespace) -> dict[str, list[float]]:
    parent = arguments.folder or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    folder = Path(tempfile.mkdtemp(prefix="diloco-bench-", dir=parent))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, str(HERE / "worker.py"), what, str(folder), str(replicas)]
    command += [str(arguments.parameters), str(arguments.rounds)]
    if sys.platform != "linux":
        del environment["GLOO_SOCKET_IFNAME"]
    workers = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(replicas)]
    try:
        failed = [rank for rank, worker in enumerate(workers) if worker.wait()]
        if failed:
            raise SystemExit(f"the workers of ranks {failed} failed; see above")
        return json.loads((folder / "result.json").read_text())
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _print_times(replicas: int, timings: dict[str, list[float]]) -> None:
    step = 1.0 if replicas >= 4 else 1.1
    rows = [
        (
            "exchange alone (mean, checksums on)",
            "exchange",
            "exchange floor",
            "input/output floor, fresh files",
            1.2,
        ),
        (
            "",
            "exchange",
            "exchange floor, files reused",
            "input/output floor, files written over",
            1.4 if replicas == 4 else None,
        ),
        ("", "exchange", "exchange floor, values", "the same, from and to the values", None),
        ("", "exchange", "gloo", "gloo all_reduce", 1.0),
        (
            "whole outer step (checksums, durable state)",
            "outer step",
            "gloo step",
            "gloo in place + fused SGD",
            step,
        ),
        ("", "outer step", "outer floor", "input/output floor, fresh files", None),
        (
            "",
            "outer step",
            "outer floor, files reused",
            "input/output floor, files written over",
            None,
        ),
        ("", "outer step", "torch.save step", "torch.save, stack, mean, SGD", 0.2),
        (
            "the same, elastic and sharded",
            "elastic sharded step",
            "gloo step",
            "gloo in place + fused SGD",
            step,
        ),
        ("", "elastic sharded step", "outer step", "fixed", None),
        (
            "the same, elastic and gather",
            "elastic gather step",
            "gloo step",
            "gloo in place + fused SGD",
            None,
        ),
    ]
    print(f"\nN = {replicas}   {'contender':<44} {'ratio':>6}  {'goal':>7}  against")
    for label, ours, peer, name, goal in rows:
        ratio = statistics.median(a / b for a, b in zip(timings[ours], timings[peer], strict=True))
        limit = f"<= {goal}" if goal else ""
        print(f"        {label:<44} {ratio:6.2f}  {limit:>7}  {name}")
    seconds = ", ".join(
        f"{name} {statistics.median(values):.3f}" for name, values in timings.items()
    )
    print(f"        medians in seconds: {seconds}")


def _print_copies(timings: dict[str, list[float]], parameters: int) -> None:
    """How fast memory is for all replicas at once; copies of a value in the time of a contender."""
    copy = statistics.median(timings["plain copy"])
    passes = ", ".join(
        f"{name} {statistics.median(timings[name]) / copy:.1f}"
        for name in ("exchange", "gloo", "outer step", "elastic sharded step", "gloo step")
    )
    print(
        f"        a plain copy of the values: {4 * parameters / copy / 1e9:.1f} GB/s per replica; "
        f"the same time as so many copies of every value: {passes}"
    )


def _print_plan(replicas: int, timings: dict[str, list[float]], parameters: int) -> None:
    """What the planner foresees here: bytes move as in the floor, and nothing else takes time."""
    moved = 4 * parameters * (1 + 2 * (replicas - 1) / replicas)  # by each replica, in the floor
    bandwidth = moved / statistics.median(timings["exchange floor, files reused"])
    folder = StoreModel(1e15, first_byte=0.0, put=0.0, poll=0.0, reads=None, writes=None)
    planned = plan_exchange(parameters, replicas, bandwidth, fixed=True, store=folder).seconds
    measured = statistics.median(timings["exchange"])
    print(f"        exchange, planned {planned:.3f} s, measured / planned {measured / planned:.2f}")


def _print_memory(replicas: int, arguments: argparse.Namespace) -> None:
    size = 4 * arguments.parameters
    sharded = (2.1 * size + size / replicas + 64 * MIB, "2.1 B + B/N + 64 MiB")
    goals = {
        "fixed": sharded,
        "sharded": sharded,
        "gather": (3.1 * size + 64 * MIB, "3.1 B + 64 MiB"),
    }
    for kind, (limit, formula) in goals.items():
        peak = max(_run(kind, replicas, arguments)["bytes"])
        label = kind if kind == "fixed" else f"elastic and {kind}"
        print(
            f"        peak memory, {label}, local and global copy included: {peak / MIB:.0f} MiB = "
            f"{peak / size:.2f} B (goal: {formula} = {limit / MIB:.0f} MiB)"
        )


def _import_milliseconds() -> float:
    # As on any machine, what was imported once is compiled.
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }

    def once() -> float:
        code = (
            "import time; t = time.perf_counter(); import diloco_protocol; "
            "print(time.perf_counter() - t)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env=environment,
        )
        return float(done.stdout)

    once()
    return 1000 * statistics.median(once() for _ in range(7))


if __name__ == "__main__":
    sys.exit(main())
