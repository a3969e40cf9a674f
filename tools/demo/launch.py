"""DiLoCo on a laptop: four local replicas and a folder, against one replica that trains alone. ``hatch run demo``."""

from __future__ import annotations

import argparse
import json
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import text

from diloco_local import LocalProcessExecutor
from diloco_protocol import ReplicaHandle, ReplicaState

# One thread per process: the replicas share the cores as it is.
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Settings:
    """What to train, and how."""

    replicas: int
    steps: int
    sync_every: int
    seed: int
    batch: int = 8
    # The best of some tries for each: alone, a replica does better with a higher learning rate.
    lr: float = 6e-3
    lone_lr: float = 1e-2
    outer_lr: float = 0.7

    def trainer_kwargs(self, folder: Path, name: str) -> dict[str, Any]:
        """What the trainer's ``train`` is called with."""
        return {
            "data": str(folder / "data"),
            "save": str(folder / f"{name}.pt"),
            "alone": name == "lone",
            "steps": self.steps,
            "sync_every": self.sync_every,
            "batch": self.batch,
            "lr": self.lone_lr if name == "lone" else self.lr,
            "outer_lr": self.outer_lr,
            "seed": self.seed,
        }


class ReplicaFailedError(Exception):
    """A replica failed; the message says which, and shows the end of its log."""


class Cohort:
    """The replicas of one launch, followed live."""

    def __init__(
        self, executor: LocalProcessExecutor, settings: Settings, folder: Path, name: str, replicas: int
    ) -> None:
        self._executor = executor
        self._name = name
        self.lines: list[dict[str, Any]] = []
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self.started = time.monotonic()
        self.handles = executor.launch_replicas(
            replicas,
            "diloco_core.replica_entrypoint:run",
            {
                "trainer_module": "trainer",
                "trainer_kwargs": settings.trainer_kwargs(folder, name),
                "rendezvous_uri": str(folder / f"{name}-store"),
            },
            env=THREADS,
            timeout=3600,
            run_id=name,
        )
        for handle in self.handles:
            threading.Thread(target=self._follow, args=(handle,), daemon=True).start()

    def wait(self, show: Callable[[dict[str, Any]], None]) -> list[float]:
        """Show progress until all have ended; returns what each returned.

        Raises:
            ReplicaFailedError: One of them failed; the others have been ended.
        """
        while True:
            try:
                line = self._queue.get(timeout=0.5)
            except queue.Empty:
                states = [self._executor.poll(handle) for handle in self.handles]
                if any(state in {ReplicaState.FAILED, ReplicaState.CANCELLED} for state in states):
                    raise ReplicaFailedError(self._blame()) from None
                if all(state is ReplicaState.SUCCEEDED for state in states) and self._queue.empty():
                    return [result["result"] for result in self._executor.collect(self.handles)]
                continue
            self.lines.append(line)
            show(line)

    def end(self) -> None:
        """Cancel whatever still runs, and wait until no process is left."""
        for handle in self.handles:
            self._executor.cancel(handle)
        self._executor.collect(self.handles, timeout=60)

    def _follow(self, handle: ReplicaHandle) -> None:
        for text_line in self._executor.log_iter(handle, follow=True, streams="stdout"):
            if text_line.startswith("{"):
                at = time.monotonic() - self.started
                self._queue.put({"run": self._name, "rank": handle.rank, "at": at, **json.loads(text_line)})

    def _blame(self) -> str:
        """Who failed first: the others only say that they lost it."""
        time.sleep(1.0)  # lets the others notice
        self.end()
        results = self._executor.collect(self.handles)
        failed = [result for result in results if result["status"] == "failed"]
        own = [result for result in failed if "ReplicaLostError" not in (result["error"] or "")] or failed
        if not own:
            return "the replicas were cancelled from outside"
        handle = next(handle for handle in self.handles if handle.rank == own[0]["rank"])
        log = self._executor.stream_logs(handle, n_lines=15)
        return f"rank {handle.rank} of run {self._name!r} failed: {own[0]['error']}\nThe end of its log:\n{log}"


def main() -> int:
    """Run the demo; returns the exit status."""
    settings, output = _arguments()
    folder = _fresh_folder(output)
    sizes = text.prepare(folder / "data", settings.replicas, settings.seed)
    print(report.introduction(settings, sizes, folder), flush=True)
    cohorts: list[Cohort] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with LocalProcessExecutor(root=folder / "processes", grace=5.0) as executor:
        try:
            diloco = Cohort(executor, settings, folder, "diloco", settings.replicas)
            cohorts.append(diloco)
            losses = diloco.wait(report.Progress(settings, settings.replicas))
            seconds = time.monotonic() - diloco.started
            print(report.between(seconds), flush=True)
            lone = Cohort(executor, settings, folder, "lone", 1)
            cohorts.append(lone)
            (lone_loss,) = lone.wait(report.Progress(settings, 1))
        except KeyboardInterrupt:
            for cohort in cohorts:
                cohort.end()
            print("\nInterrupted: all replicas have been ended.", flush=True)
            return 130
        except ReplicaFailedError as error:
            print(f"\n{error}", file=sys.stderr, flush=True)
            return 1
    report.write(folder, settings, diloco.lines, lone.lines, losses, lone_loss, seconds)
    return 0


def _fresh_folder(output: Path) -> Path:
    number = 1
    while (folder := output / f"run-{number}").exists():
        number += 1
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise SystemExit(f"--output {str(output)!r} cannot be written: {error.strerror}") from None
    return folder.resolve()


def _arguments() -> tuple[Settings, Path]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=4, help="how many replicas (default: 4)")
    parser.add_argument("--steps", type=int, help="inner steps of each replica (default: 2000)")
    parser.add_argument("--sync-every", type=int, help="inner steps between two syncs (default: 25)")
    parser.add_argument("--seed", type=int, default=0, help="of the model, the order of the text and the samples")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="only a few steps: shows that everything works")
    given = parser.parse_args()
    steps = given.steps if given.steps is not None else (60 if given.quick else 2000)
    sync_every = given.sync_every if given.sync_every is not None else (20 if given.quick else 25)
    if not 1 <= given.replicas <= 64:
        parser.error(f"--replicas must be from 1 to 64, not {given.replicas}")
    if steps < 20:
        parser.error(f"--steps must be at least 20, not {steps}")
    if not 1 <= sync_every <= steps:
        parser.error(f"--sync-every must be from 1 to the number of steps ({steps}), not {sync_every}")
    return Settings(given.replicas, steps, sync_every, given.seed), given.output


if __name__ == "__main__":
    sys.exit(main())
