"""What telemetry costs the thread that trains: ``hatch run bench-telemetry``.

* An inner step far from a sync, with telemetry and with ``telemetry=False``, in turns.
* ``outer.log(loss=..., tokens=...)``, and the same with 32 metrics, which is the most.
* At a sync: its report is noted for the thread that writes.
* What that thread takes for an object, during which it may hold Python's lock.

Goal: 20 microseconds for a step with a call of ``outer.log``.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from diloco_core import DiLoCo, StoreExchange, SyncReport, Timing, connect
from diloco_protocol.telemetry import MOST_METRICS

FEW = {"loss": 2.31, "tokens": 4096}
MANY = {**FEW, **{f"metric {number}": number / 3 for number in range(MOST_METRICS - len(FEW))}}
SYNCS = 1000
REPORT = SyncReport(1, "0", True, 4, 10**6, 10**6, 1.0, 1.0, 60.0, total_inner_steps=100)


def main() -> int:
    """Measure, and print microseconds and milliseconds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns of the contenders")
    parser.add_argument("--steps", type=int, default=5000, help="steps of each turn")
    arguments = parser.parse_args()
    logging.disable()  # it would say that the steps below are in no sync
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        for number in range(arguments.rounds):
            for tells in (False, True):
                _measure(Path(folder) / f"{number}-{tells}", tells, arguments.steps, found)
    median = {name: statistics.median(values) for name, values in found.items()}
    print(f"medians of {arguments.rounds} rounds of {arguments.steps}")
    for name, seconds in median.items():
        unit, factor = ("ms", 1e3) if name.startswith("the other thread") else ("us", 1e6)
        print(f"{name}: {factor * seconds:.2f} {unit}")
    steps = [b - a for a, b in zip(found[_step(False)], found[_step(True)], strict=True)]
    more = 1e6 * statistics.median(steps)
    print(f"a step with telemetry, more than without: {more:.2f} us")
    for metrics in (FEW, MANY):
        both = more + 1e6 * median[_log(metrics)]
        print(f"the same and {_log(metrics)}: {both:.2f} us (goal: 20)")
    return 0


def _step(tells: bool) -> str:
    return f"a step, telemetry={tells}"


def _log(metrics: dict[str, float]) -> str:
    return f"outer.log, {len(metrics)} metrics"


class _Looks:
    """Stands for the thread that writes, and for its clock: it looks when it is told to."""

    def __init__(self) -> None:
        self.acts: list[Callable[[], object]] = []
        self.later = 0.0

    def repeat(self, _: float, act: Callable[[], object]) -> Callable[[], None]:
        """Keep what would be repeated: signs of life, and then telemetry."""
        self.acts.append(act)
        return lambda: None

    def clock(self) -> float:
        """Return the time, to which every look adds a minute."""
        return time.monotonic() + self.later

    def look(self) -> None:
        """Let it write whatever is due."""
        self.later += 61.0
        self.acts[-1]()


def _measure(folder: Path, tells: bool, number: int, found: dict[str, list[float]]) -> None:
    def add(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
    (parameter,) = model.parameters()
    parameter.grad = torch.zeros_like(parameter)
    exchange = connect(folder / "steps", rank=0, world_size=1, telemetry=tells)
    with DiLoCo(model, optimizer, exchange, sync_every=10**9, flush="none") as outer:
        add(_step(tells), _each(optimizer.step, number))
        for metrics in (FEW, MANY) if tells else ():
            add(_log(metrics), _each(lambda metrics=metrics: outer.log(**metrics), number))
    if not tells:
        return
    looks = _Looks()
    timing = Timing(clock=looks.clock, repeat=looks.repeat)
    exchange = connect(folder / "looks", rank=0, world_size=1, timing=timing)
    assert isinstance(exchange, StoreExchange)
    telemetry = exchange.telemetry
    assert telemetry is not None
    with DiLoCo(model, optimizer, exchange, sync_every=10**9, flush="none"):
        add("a report is noted", _each(lambda: telemetry.synced(REPORT), SYNCS))
        looks.look()
        telemetry.synced(REPORT)
        add(f"the other thread, a history object of {SYNCS} syncs too", _each(looks.look, 1))
        add("the other thread, a live object", _each(looks.look, 20))


def _each(act: Callable[[], object], number: int) -> float:
    """Seconds of one time."""
    start = time.perf_counter()
    for _ in range(number):
        act()
    return (time.perf_counter() - start) / number


if __name__ == "__main__":
    sys.exit(main())
