"""Kill replicas of an elastic run at random, again and again, and see whether the run minds.

    python tools/chaos/run.py --replicas 4 --seconds 180 --kill-every 10

Runs the same training twice over a local folder, once undisturbed and once with ``kill -9``, and prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from worker import TRAINING, data, make_model

from diloco_core import export

WORKER = Path(__file__).with_name("worker.py")


class Cohort:
    """The replicas of one run, as processes that are started again when they die."""

    def __init__(self, folder: Path, replicas: int, syncs: int, step_seconds: float, grace: float) -> None:
        self.folder = folder
        self.replicas = replicas
        self._options = {"world_size": replicas, "syncs": syncs, "step_seconds": step_seconds, "grace": grace}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.kills: list[tuple[float, int]] = []
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        self.folder.mkdir()
        for rank in range(self.replicas):
            self._start(rank)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def watch(self, kill_every: float | None, timeout: float, chance: random.Random) -> None:
        """Start the dead again until all replicas have finished; meanwhile kill one from time to time.

        Only when the last victim is back, so that what is measured is one death at a time.
        """
        deadline = time.monotonic() + timeout
        next_kill = time.monotonic() + kill_every if kill_every else float("inf")
        finished: set[int] = set()
        while len(finished) < self.replicas:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the run did not finish within {timeout:g} s; finished: {sorted(finished)}")
            time.sleep(0.05)
            if time.monotonic() >= next_kill and not finished and self._all_back():
                next_kill = time.monotonic() + (kill_every or 0) * chance.uniform(0.7, 1.3)
                victim = chance.randrange(self.replicas)
                self.kills.append((time.time(), victim))
                self._processes[victim].kill()
            for rank, process in self._processes.items():
                status = process.poll()
                if status == 0:
                    finished.add(rank)
                elif status is not None and rank not in finished:
                    if status != -9:
                        self.failures.append(f"rank {rank} exited with {status}")
                    self._start(rank)

    def _all_back(self) -> bool:
        """Whether every process has reported a sync."""
        pids = {rank: process.pid for rank, process in self._processes.items()}
        logs = {rank: self.folder / f"{rank}.jsonl" for rank in pids}
        return all(log.exists() and f'"pid": {pids[rank]},' in log.read_text() for rank, log in logs.items())

    def lines(self) -> list[dict[str, Any]]:
        """All reports of all lives."""
        found = []
        for log in sorted(self.folder.glob("*.jsonl")):
            for line in log.read_text().splitlines():
                try:
                    found.append(json.loads(line))
                except ValueError:  # the last line of a life that was killed
                    continue
        return found

    def loss(self) -> tuple[float, float]:
        """Validation loss and accuracy of the model in the store."""
        export(str(self.folder / "run"), self.folder / "model.safetensors")
        model = make_model()
        model.load_state_dict(load_file(self.folder / "model.safetensors"))
        images, labels = data()
        with torch.no_grad():
            scores = model(images[TRAINING:])
        right = (scores.argmax(1) == labels[TRAINING:]).float().mean().item()
        return torch.nn.functional.cross_entropy(scores, labels[TRAINING:]).item(), right

    def _start(self, rank: int) -> None:
        log = self.folder / f"{rank}.jsonl"
        arguments = {"uri": str(self.folder / "run"), "rank": rank, "log": str(log), **self._options}
        with (self.folder / f"{rank}.err").open("ab") as errors:
            self._processes[rank] = subprocess.Popen(
                [sys.executable, str(WORKER), json.dumps(arguments)], stderr=errors
            )


def judge(cohort: Cohort, grace: float) -> dict[str, Any]:
    """What can be said of a run from its logs."""
    lines = [line for line in cohort.lines() if line["committed"]]
    digests: dict[int, set[str]] = {}
    for line in lines:
        digests.setdefault(line["sync"], set()).add(line["digest"])
    loss, accuracy = cohort.loss()
    return {
        "syncs": len(digests),
        "reports": len(lines),
        "kills": len(cohort.kills),
        "failures": cohort.failures,
        "disagreements": sum(len(found) > 1 for found in digests.values()),
        "longest_wait": round(max(line["wait_seconds"] for line in lines), 2),
        "grace": grace,
        "mean_members": round(sum(line["members"] for line in lines) / len(lines), 2),
        "loss": round(loss, 4),
        "accuracy": round(accuracy, 4),
        "files": sum(1 for path in (cohort.folder / "run").rglob("*") if path.is_file()),
        "megabytes": round(sum(p.stat().st_size for p in (cohort.folder / "run").rglob("*") if p.is_file()) / 1e6, 2),
    }


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=180.0, help="about how long the disturbed run takes")
    parser.add_argument("--kill-every", type=float, default=10.0)
    parser.add_argument("--grace", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    syncs = max(5, int(arguments.seconds / 1.4))
    found = {}
    with tempfile.TemporaryDirectory(prefix="diloco-chaos-") as folder:
        for name, kill_every, step_seconds in (("undisturbed", None, 0.0), ("disturbed", arguments.kill_every, 0.1)):
            cohort = Cohort(Path(folder) / name, arguments.replicas, syncs, step_seconds, arguments.grace)
            with cohort:
                cohort.watch(kill_every, 4 * arguments.seconds + 120, random.Random(arguments.seed))
            found[name] = judge(cohort, arguments.grace)
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
