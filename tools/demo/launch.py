"""DiLoCo on a laptop: four local replicas and a folder, beside training alone and averaging.

``hatch run demo``; with ``--kill 2``, replica 2 is killed with SIGKILL on the way, and comes back.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import text
from settings import Settings

from diloco_local import LocalProcessExecutor
from diloco_protocol import DilocoError, ReplicaHandle, ReplicaState

RUNS = ("diloco", "averaged", "lone")
"""Four replicas with DiLoCo; one process with all four's batches; one with the first one's."""


def _threads(number: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(number), "MKL_NUM_THREADS": str(number)}


class ReplicaFailedError(Exception):
    """A replica failed; the message says which, and shows the end of its log."""


class Cohort:
    """The replicas of one launch, followed live."""

    def __init__(
        self,
        executor: LocalProcessExecutor,
        settings: Settings,
        folder: Path,
        name: str,
        replicas: int,
    ) -> None:
        self._executor = executor
        self._name = name
        self._to_kill = settings.kill if name == "diloco" else None
        self._kill_after = settings.steps // 3
        self._killed: int | None = None  # the number of the process that was killed
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._started = time.monotonic()
        self.lines: list[dict[str, Any]] = []
        self.handles = executor.launch_replicas(
            replicas,
            "diloco_core.replica_entrypoint:run",
            {
                "trainer_module": "trainer",
                "trainer_fn": "train",
                "trainer_kwargs": settings.trainer_kwargs(folder, name),
                "rendezvous_uri": str(folder / f"{name}-store"),
            },
            # The replicas share the cores as it is; the process with all batches has two for
            # itself.
            env=_threads(2 if name == "averaged" else 1),
            run_id=name,
            max_restarts=int(settings.kill is not None),
        )
        for handle in self.handles:
            threading.Thread(target=self._follow, args=(handle,), daemon=True).start()

    def wait(self, show: Callable[[dict[str, Any]], None]) -> float:
        """Show progress until all have ended; returns the mean of what they returned.

        Raises:
            ReplicaFailedError: One of them failed.
        """
        running = len(self.handles)
        while running:
            line = self._queue.get()
            if line is not None:
                self.lines.append(line)
                show(line)
                self._kill(line)
                continue
            running -= 1
            states = {self._executor.poll(handle) for handle in self.handles}
            if states & {ReplicaState.FAILED, ReplicaState.CANCELLED}:
                raise ReplicaFailedError(self._blame())
        return statistics.fmean(result["result"] for result in self._executor.collect(self.handles))

    def _kill(self, line: dict[str, Any]) -> None:
        """Kill one replica, once, as a machine that fails would, and say when it is back."""
        rank, pid = self._to_kill, line.get("pid")
        if line["rank"] != rank:
            return
        if self._killed is None and line["total_inner_steps"] >= self._kill_after:
            print(f"\nkill -9 {pid}: replica {rank} is gone, and the others wait\n", flush=True)
            self._killed = pid
            os.kill(line["pid"], signal.SIGKILL)
        elif self._killed not in (None, pid):
            print(
                f"\nreplica {rank} is back since sync {line['sync']}, step "
                f"{line['total_inner_steps']}: process {pid} is its second incarnation\n"
            )
            self._to_kill = None

    def _follow(self, handle: ReplicaHandle) -> None:
        try:
            for text_line in self._executor.log_iter(handle, follow=True, streams="stdout"):
                if text_line.startswith("{"):
                    at = time.monotonic() - self._started
                    self._queue.put(
                        {"run": self._name, "rank": handle.rank, "at": at, **json.loads(text_line)}
                    )
        finally:
            self._queue.put(None)  # this replica has ended, and all its lines are in the queue

    def _blame(self) -> str:
        """Who failed first (the others only say that they lost it), with the end of its log."""
        statuses = {handle: self._executor.describe(handle) for handle in self.handles}
        failed = [
            handle for handle in self.handles if statuses[handle].state is ReplicaState.FAILED
        ]
        if not failed:
            return f"the replicas of run {self._name!r} were cancelled from outside"
        first = min(failed, key=lambda handle: statuses[handle].finished_at or math.inf)
        (result,) = self._executor.collect([first])
        log = self._executor.stream_logs(first, n_lines=100).splitlines()
        tail = [line for line in log if not line.startswith("{")][-20:] or ["(empty)"]
        return (
            f"rank {first.rank} of run {self._name!r} failed: {result['error']}\nThe end of its "
            "log:\n" + "\n".join(tail)
        )


def main() -> int:
    """Run the demo; returns the exit status."""
    settings, output = _arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, signal.default_int_handler)
    try:
        _demo(settings, output)
    except KeyboardInterrupt:
        print("\nInterrupted: all replicas have been ended.", flush=True)
        return 130
    except (ReplicaFailedError, DilocoError) as error:
        print(f"\n{error}\nAll other replicas have been ended.", file=sys.stderr, flush=True)
        return 1
    return 0


def _demo(settings: Settings, output: Path) -> None:
    folder = _fresh_folder(output)
    sizes = text.prepare(folder / "data", settings.replicas, settings.seed)
    print(report.introduction(settings, sizes, folder), flush=True)
    with LocalProcessExecutor(root=folder / "processes", grace=5.0) as executor:
        try:
            started = time.monotonic()
            diloco = Cohort(executor, settings, folder, "diloco", settings.replicas)
            loss = diloco.wait(report.Progress(settings, settings.replicas))
            seconds = time.monotonic() - started
            lines, losses = {}, {"diloco": loss}
            for name in RUNS[1:]:
                print(report.between(settings, name), flush=True)
                alone = Cohort(executor, settings, folder, name, 1)
                losses[name] = alone.wait(report.Progress(settings, 1))
                lines[name] = alone.lines
        except BaseException:
            _end_all(executor)
            print(f"\nWhat was done so far is in {folder}", flush=True)
            raise
    page = folder / "report.html"
    report.write(folder, settings, report.Outcome(_reported(folder, page), lines, losses, seconds))
    print(f"report   {page}")


def _reported(folder: Path, page: Path) -> dict[str, Any]:
    """Return what ``diloco report`` says of the run with DiLoCo, and write its page."""
    options = ["--backend", "local_process", "--option", f"root={folder / 'processes'}"]
    command = [sys.executable, "-m", "diloco_cli", "report", "diloco", *options, "--json"]
    said = subprocess.run([*command, "-o", page], check=True, stdout=subprocess.PIPE).stdout
    facts: dict[str, Any] = json.loads(said)
    (folder / "report.json").write_bytes(said)
    return facts


def _end_all(executor: LocalProcessExecutor) -> None:
    """Cancel what still runs, and wait until all is ended; a second Ctrl-C changes nothing."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    handles = [handle for run_id in executor.list_runs() for handle in executor.attach(run_id)]
    for handle in handles:
        executor.cancel(handle)
    executor.collect(handles, timeout=60)


def _fresh_folder(output: Path) -> Path:
    number = 1
    try:
        output.mkdir(parents=True, exist_ok=True)
        while True:
            folder = output / f"run-{number}"
            try:
                folder.mkdir()
            except FileExistsError:
                number += 1
            else:
                return folder.resolve()
    except OSError as error:
        raise SystemExit(f"--output {str(output)!r} cannot be written: {error.strerror}") from None


def _arguments() -> tuple[Settings, Path]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=4, help="how many replicas (default: 4)")
    parser.add_argument("--steps", type=int, help="inner steps of each replica (default: 1500)")
    parser.add_argument(
        "--sync-every", type=int, help="inner steps between two syncs (default: 25)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the model, the order of the text and the samples"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="folder for the results"
    )
    parser.add_argument(
        "--kill",
        type=int,
        metavar="RANK",
        help="kill this replica with SIGKILL after a third of its steps, and let it come back",
    )
    parser.add_argument(
        "--quick", action="store_true", help="only a few steps: shows that everything works"
    )
    given = parser.parse_args()
    steps = given.steps if given.steps is not None else (60 if given.quick else 1500)
    sync_every = given.sync_every if given.sync_every is not None else (20 if given.quick else 25)
    if not 1 <= given.replicas <= 64:
        parser.error(f"--replicas must be from 1 to 64, not {given.replicas}")
    if steps < 20:
        parser.error(f"--steps must be at least 20, not {steps}")
    if not 1 <= sync_every <= steps:
        parser.error(
            f"--sync-every must be from 1 to the number of steps ({steps}), not {sync_every}"
        )
    if not 0 <= given.seed < 2**32:
        parser.error(f"--seed must be from 0 to {2**32 - 1}, not {given.seed}")
    if given.kill is not None and not 0 <= given.kill < given.replicas:
        parser.error(f"--kill must be a rank from 0 to {given.replicas - 1}, not {given.kill}")
    return Settings(given.replicas, steps, sync_every, given.seed, kill=given.kill), given.output


if __name__ == "__main__":
    sys.exit(main())
