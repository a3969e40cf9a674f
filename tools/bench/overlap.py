"""What overlap and codecs cost and gain, as ratios within one run: ``hatch run bench-overlap``.

* Inner steps that only sleep, as if a GPU took them: how long they take while an exchange runs
  behind them, beside how long they take while none does. The exchange runs over a link of 1 Gbit/s,
  and over a folder in memory, where it never waits and keeps a core busy. The steps that send and
  adopt a fragment are not among them; their time is said beside it.
* The peak memory of the outer side with a delay: local and global copy included, in copies of the
  fp32 model.
* The time of syncs over a slow link with int8 in both directions, beside that of syncs without
  codecs. Each replica has a link of its own
  (``packages/diloco-core/benchmarks/proof/throttle.py``); every eighth sync publishes its values
  whole.

Replicas are processes with one thread each (two while a sync is under way).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from diloco_core import DiLoCo, StoreExchange, Timing, connect
from diloco_core._store._open import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
PROOF = HERE.parents[1] / "packages" / "diloco-core" / "benchmarks"
MIB = 2**20
FULL_EVERY = 8
GBIT = 125e6  # bytes per second


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parameters",
        type=int,
        default=25_000_000,
        help="fp32 parameters (default: 25 million); a tenth of them on the slow link",
    )
    parser.add_argument("--rounds", type=int, default=20, help="syncs behind sleeping steps")
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=5e6,
        help="bytes per second on the slow link (default: 5e6)",
    )
    parser.add_argument(
        "--what",
        nargs="+",
        choices=("steps", "memory", "link"),
        default=("steps", "memory", "link"),
        help="what to measure (default: everything)",
    )
    arguments = parser.parse_args()
    load = ", ".join(f"{number:.1f}" for number in os.getloadavg())
    print(f"{arguments.parameters:,} fp32 parameters, {os.cpu_count()} cores, load {load}")
    size = 4 * arguments.parameters
    if "steps" in arguments.what:
        _print_steps(arguments)
    if "memory" in arguments.what:
        for fragments in (1, 4):
            peak = max(_run("memory", 4, parameters=arguments.parameters, fragments=fragments))
            limit = 2.1 + 1 / 4 + 1 / fragments
            print(
                f"peak memory with a delay, N = 4, {fragments} fragment(s): {peak / size:.2f} B "
                f"(goal: 2.1 + 1/N + 1/{fragments} = {limit:.2f} B, and 64 MiB = "
                f"{64 * MIB / size:.2f} B)"
            )
    if "link" in arguments.what:
        _print_link(arguments)
    return 0


def _print_steps(arguments: argparse.Namespace) -> None:
    for where, bandwidth in (("a link of 1 Gbit/s", GBIT), ("a folder in memory", None)):
        found = _run(
            "steps",
            2,
            parameters=arguments.parameters,
            rounds=arguments.rounds,
            bandwidth=bandwidth,
        )
        counted = sum(len(each["behind"]) for each in found)
        if not all(each["behind"] for each in found):
            raise SystemExit("an exchange ends before a step does: pass more --parameters")
        for name in ("median", "mean"):
            average = getattr(statistics, name)
            slowed = statistics.mean(
                average(each["behind"]) / average(each["alone"]) for each in found
            )
            goal = " (goal: below 1.01)" if name == "mean" else ""
            print(
                f"{counted} sleeping steps while an exchange over {where} runs, N = 2, {name}: "
                f"{slowed:.4f} of those without one{goal}"
            )
    ends = statistics.median(step for each in found for step in each["ends"])
    alone = statistics.median(step for each in found for step in each["alone"])
    print(
        f"a step that sends or adopts: {1000 * (ends - alone):.1f} ms longer than one that does not"
    )


def _print_link(arguments: argparse.Namespace) -> None:
    parameters = arguments.parameters // 10
    found = {
        codec: _run("link", 4, parameters=parameters, codec=codec, bandwidth=arguments.bandwidth)
        for codec in ("plain", "int8")
    }
    plain, int8 = (max(seconds for seconds, _ in found[codec]) for codec in ("plain", "int8"))
    moved = [sum(size for _, size in found[codec]) for codec in ("plain", "int8")]
    print(
        f"{FULL_EVERY} syncs over {arguments.bandwidth / 1e6:g} MB/s, N = 4, int8 both ways: "
        f"{int8 / plain:.3f} of the time without codecs ({int8:.1f} s of {plain:.1f} s; goal: <= "
        f"0.35), {moved[1] / moved[0]:.3f} of the bytes"
    )


def _run(what: str, replicas: int, **task: Any) -> list[Any]:
    """What the replicas found, in rank order."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="diloco-bench-", dir=parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    workers = []
    try:
        for rank in range(replicas):
            told = json.dumps({**task, "folder": folder, "rank": rank, "replicas": replicas})
            command = [sys.executable, __file__, f"--replica={what}", told]
            workers.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            )
        outputs = [worker.communicate()[0] for worker in workers]
        failed = [rank for rank, worker in enumerate(workers) if worker.returncode]
        if failed:
            raise SystemExit(f"the replicas {failed} failed; see above")
        return [json.loads(output) for output in outputs]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _model(parameters: int, rank: int, tensors: int = 8) -> torch.nn.ParameterList:
    generator = torch.Generator().manual_seed(0)
    sizes = [len(part) for part in torch.empty(parameters, device="meta").tensor_split(tensors)]
    model = torch.nn.ParameterList(torch.randn(size, generator=generator) for size in sizes)
    with torch.no_grad():
        for tensor in model:
            tensor.add_(0.01 * rank)
    return model


def _steps(task: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of steps during a sync, of steps during none, and of those that send or adopt."""
    model = _model(task["parameters"], task["rank"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # without gradients: changes nothing
    running = threading.Event()

    def in_background(act: Callable[[], object]) -> Callable[[float | None], bool]:
        def marked() -> None:
            running.set()
            try:
                act()
            finally:
                running.clear()

        return Timing().in_background(marked)

    store = open_store(task["folder"])
    if task["bandwidth"] is not None:
        store = _throttled(store, task["bandwidth"])
    timing = Timing(in_background=in_background)
    exchange = StoreExchange(store, task["rank"], task["replicas"], timing=timing)
    found: dict[str, list[float]] = {"behind": [], "alone": [], "ends": []}
    period, delay, warm = 300, 250, 3
    with DiLoCo(model, optimizer, exchange, sync_every=period, delay=delay) as outer:
        for number in range((task["rounds"] + warm) * period):
            before = running.is_set()
            start = time.perf_counter()
            time.sleep(0.01)
            optimizer.step()
            seconds = time.perf_counter() - start
            at = number % period
            if number < warm * period:
                continue
            if at in (period - delay - 1, period - 1):
                found["ends"].append(seconds)
            elif before and running.is_set():
                found["behind"].append(seconds)
            elif not outer.syncing and at > 2:
                found["alone"].append(seconds)
    return found


def _memory(task: dict[str, Any]) -> int:
    """Growth of peak resident memory from before the model is made, with a delay."""

    def outer_steps(name: str, model: torch.nn.ParameterList, fragments: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        exchange = connect(
            f"{task['folder']}/{name}", rank=task["rank"], world_size=task["replicas"]
        )
        options: dict[str, Any] = {"sync_every": 4 * fragments, "delay": 2, "alpha": 0.5}
        with DiLoCo(model, optimizer, exchange, fragments=fragments, **options):
            for _ in range(4 * 4 * fragments):
                with torch.no_grad():
                    for tensor in model:
                        tensor.mul_(0.999)
                optimizer.step()

    outer_steps("warm", _model(1000, 0), 1)
    before = _peak_bytes()
    outer_steps("outer", _model(task["parameters"], task["rank"]), task["fragments"])
    return _peak_bytes() - before


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _link(task: dict[str, Any]) -> list[float]:
    """Seconds, and bytes on a slow link, of the syncs from one whole publication to the next."""
    model = _model(task["parameters"], task["rank"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    store = _throttled(open_store(task["folder"] + "/" + task["codec"]), task["bandwidth"])
    link = store.link
    exchange = StoreExchange(store, task["rank"], task["replicas"])
    options: dict[str, Any] = {}
    if task["codec"] != "plain":
        options = {
            "codec": task["codec"],
            "state_codec": task["codec"],
            "full_state_every": FULL_EVERY,
        }
    seconds: list[float] = []
    with DiLoCo(model, optimizer, exchange, sync_every=1, save_inner_every=0, **options):
        for _ in range(1 + FULL_EVERY):
            with torch.no_grad():
                for tensor in model:
                    tensor.mul_(0.999)
            start = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
            if len(seconds) == 1:
                before = link.up.bytes + link.down.bytes
    return [sum(seconds[1:]), link.up.bytes + link.down.bytes - before]


def _throttled(store: Any, bandwidth: float) -> Any:
    """A store behind a link of so many bytes per second, with 5 ms more for each request."""
    sys.path.insert(0, str(PROOF))
    from proof.throttle import Link, ThrottledStore

    return ThrottledStore(store, Link(bandwidth, latency=0.005))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("--replica="):
        torch.set_num_threads(1)
        act = {"steps": _steps, "memory": _memory, "link": _link}[sys.argv[1].partition("=")[2]]
        print(json.dumps(act(json.loads(sys.argv[2]))))
    else:
        sys.exit(main())
