"""The replicas of one run as processes: started, killed, stopped, woken later, and always ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable

NURSERY = Path(__file__).with_name("nursery.py")
FINISHED, FENCED = 0, 3


@dataclass
class Incarnation:
    """One incarnation of a rank.

    Attributes:
        number: Its number in the cohort.
        rank: Which replica it is.
        pid: Its process, once it is known.
        status: How it ended, once it has.
        killed: Whether this cohort killed it.
        wake_at: When a stopped one is to go on.
        wake_after: After how many syncs of its successor it goes on at the earliest.
    """

    number: int
    rank: int
    pid: int | None = None
    status: int | None = None
    killed: bool = False
    wake_at: float | None = None
    wake_after: int = 0


@dataclass
class Ends:
    """How incarnations ended."""

    finished: int = 0
    fenced: int = 0
    killed: int = 0
    refused: int = 0
    errors: dict[str, int] = field(default_factory=dict)


class Cohort:
    """Keeps ``replicas`` ranks alive; whoever dies is started again.

    Everything runs in one process group, which is killed when the block is left.

    Args:
        folder: For logs and the stop file.
        replicas: How many ranks.
        settings: What every incarnation is told besides its rank; see :class:`worker.Settings`.
        environment: Environment variables for all of them.

    Attributes:
        outages: Whether the store has been away for some time; to be set.
        ends: How incarnations ended.
        violations: Ends that nothing explains, a sentence each.
        current: The rightful incarnation of every rank, as far as can be told from outside.
        zombies: Incarnations that have been replaced and have not ended yet.
    """

    def __init__(
        self, folder: Path, replicas: int, settings: dict[str, Any], environment: dict[str, str]
    ) -> None:
        self.replicas = replicas
        self.outages: Callable[[], bool] = lambda: False
        self.ends = Ends()
        self.violations: list[str] = []
        self.current: dict[int, Incarnation] = {}
        self.zombies: list[Incarnation] = []
        self._folder = folder
        self._settings = settings
        self._environment = environment
        self._incarnations: list[Incarnation] = []
        self._lines: list[dict[str, Any]] = []
        self._read: dict[Path, int] = {}
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()

    def __enter__(self) -> Self:
        self._nursery = subprocess.Popen(
            [sys.executable, str(NURSERY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                **self._environment,
            },
            start_new_session=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()
        for rank in range(self.replicas):
            self.start(rank)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._nursery.pid, signal.SIGKILL)
        self._nursery.wait()
        for pipe in (self._nursery.stdin, self._nursery.stdout):
            if pipe is not None:
                pipe.close()

    @property
    def incarnations(self) -> int:
        """How many incarnations there have been."""
        return len(self._incarnations)

    def start(self, rank: int) -> None:
        """Begin an incarnation of a rank; if the one before it still lives, it is a zombie now."""
        before = self.current.get(rank)
        if before is not None and before.status is None:
            self.zombies.append(before)
        incarnation = Incarnation(len(self._incarnations), rank)
        self._incarnations.append(incarnation)
        self.current[rank] = incarnation
        arguments = {
            "rank": rank,
            "world_size": self.replicas,
            "incarnation": incarnation.number,
            "log": str(self._folder / f"{rank}.jsonl"),
            "stop": str(self._folder / "stop"),
            **self._settings,
        }
        self._ask(
            {
                "start": incarnation.number,
                "arguments": arguments,
                "errors": str(self._folder / f"{rank}.err"),
            }
        )

    def export(self, path: Path, seconds: float) -> dict[str, float]:
        """Write the run's model to a file, once all have finished; how good it is."""
        arguments = {"uri": self._settings["uri"], "world_size": self.replicas, "path": str(path)}
        errors = self._folder / "export.err"
        self._ask({"start": -1, "export": True, "arguments": arguments, "errors": str(errors)})
        while "status" not in (answer := self._answers.get(timeout=seconds)):
            pass
        if answer["status"] != FINISHED:
            raise RuntimeError(
                f"the run cannot be exported: {errors.read_text().splitlines()[-1:]}"
            )
        return dict(json.loads(path.with_suffix(".json").read_text()))

    def kill(self, incarnation: Incarnation) -> None:
        """Kill -9."""
        incarnation.killed = True
        incarnation.wake_at = None
        self._signal(incarnation, signal.SIGKILL)

    def stop(self, incarnation: Incarnation, seconds: float, wake_after: int) -> None:
        """Send SIGSTOP; and SIGCONT later, once its successor has made ``wake_after`` syncs."""
        incarnation.wake_at = time.monotonic() + seconds
        incarnation.wake_after = wake_after
        self._signal(incarnation, signal.SIGSTOP)

    def look_after(self) -> None:
        """Wake who has slept enough, start the dead again, and judge how they ended.

        To be called often.
        """
        now = time.monotonic()
        for incarnation in [
            incarnation
            for incarnation in self._incarnations
            if incarnation.wake_at is not None and now >= incarnation.wake_at
        ]:
            successor = self.current[incarnation.rank]
            if (
                successor is incarnation
                or self._syncs(successor) >= incarnation.wake_after
                or successor.status is not None
            ):
                incarnation.wake_at = None
                self._signal(incarnation, signal.SIGCONT)
        while True:
            try:
                answer = self._answers.get_nowait()
            except queue.Empty:
                return
            if "gone" in answer:
                raise RuntimeError(
                    "the process that starts the replicas has ended; see its errors above"
                )
            incarnation = self._incarnations[answer["number"]]
            if "pid" in answer:
                incarnation.pid = answer["pid"]
            else:
                self._ended(incarnation, answer["status"])

    def settled(self) -> bool:
        """Say whether all run, no zombie is left, and every present incarnation has synced.

        One that has finished counts, too.
        """
        if self.zombies or any(
            incarnation.wake_at is not None for incarnation in self._incarnations
        ):
            return False
        return self.has_synced()

    def has_synced(self) -> bool:
        """Whether every rank has made a sync in its present incarnation, or has finished."""
        return all(
            self._syncs(incarnation) or incarnation.status == FINISHED
            for incarnation in self.current.values()
        )

    def finished(self) -> bool:
        """Whether every rank has finished and no zombie is left."""
        return not self.zombies and all(
            incarnation.status == FINISHED for incarnation in self.current.values()
        )

    def lines(self) -> list[dict[str, Any]]:
        """What the incarnations have logged, in the order of the events of every rank."""
        for log in sorted(self._folder.glob("*.jsonl")):
            with log.open("rb") as file:
                file.seek(self._read.get(log, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read[log] = self._read.get(log, 0) + len(whole) + len(newline)
            self._lines += map(json.loads, whole.splitlines())
        return self._lines

    def describe(self) -> str:
        """Where the ranks are, in words."""
        last = {
            line["incarnation"]: f"{line['event']} {line.get('report', line).get('sync', '')}"
            for line in self.lines()
        }
        incarnations = [*self.current.values(), *self.zombies]
        return ", ".join(
            f"rank {incarnation.rank} (incarnation {incarnation.number}): "
            f"{last.get(incarnation.number, 'nothing')}"
            for incarnation in incarnations
        )

    def end_after(self, syncs: int) -> None:
        """Let the run end once it has made so many syncs."""
        draft = self._folder / "stop.draft"
        draft.write_text(str(syncs))
        draft.replace(self._folder / "stop")

    def _ended(self, incarnation: Incarnation, status: int) -> None:
        incarnation.status = status
        beside = [
            other
            for other in self.zombies
            if other.rank == incarnation.rank and other is not incarnation
        ]
        if status == FENCED and incarnation is self.current[incarnation.rank] and beside:
            # Of two incarnations that begin at the same time, the one that was started first may
            # claim last.
            self.current[incarnation.rank] = beside[-1]
            self.zombies.remove(beside[-1])
            self.zombies.append(incarnation)
        zombie = incarnation in self.zombies
        if zombie:
            self.zombies.remove(incarnation)
        if status == FINISHED:
            self.ends.finished += 1
        elif status == -signal.SIGKILL and incarnation.killed:
            self.ends.killed += 1
        elif status == FENCED and zombie:
            self.ends.fenced += 1
        else:
            self._complain(incarnation, status, zombie)
        if status != FINISHED and not zombie:
            self.start(incarnation.rank)

    def _complain(self, incarnation: Incarnation, status: int, zombie: bool) -> None:
        """An end that nothing explains."""
        own = [
            line
            for line in self.lines()
            if line["incarnation"] == incarnation.number and line["event"] == "end"
        ]
        how = own[-1]["how"] if own else f"status {status}"
        text = own[-1]["text"] if own else "it left no word"
        if (
            how == "StoreUnavailableError"
            and self.outages()
            and incarnation.number not in self._entered()
        ):
            self.ends.refused += 1  # connecting to a store that is away fails soon, by design
            return
        self.ends.errors[how] = self.ends.errors.get(how, 0) + 1
        who = (
            f"the zombie (incarnation {incarnation.number}) of rank {incarnation.rank}"
            if zombie
            else f"rank {incarnation.rank} (incarnation {incarnation.number})"
        )
        if len(self.violations) < 100:
            self.violations.append(f"{who} ended with {how}: {text}")
        if len(self.ends.errors) > 50 or sum(self.ends.errors.values()) > 200:
            raise RuntimeError("replicas end with errors again and again; the last one: " + text)

    def _syncs(self, incarnation: Incarnation) -> int:
        """How many syncs an incarnation has made."""
        return sum(
            line["incarnation"] == incarnation.number and line["event"] == "sync"
            for line in self.lines()
        )

    def _entered(self) -> set[int]:
        """Numbers of the incarnations that have joined the run."""
        return {line["incarnation"] for line in self.lines() if line["event"] == "enter"}

    def _ask(self, command: dict[str, Any]) -> None:
        if self._nursery.stdin is not None:
            self._nursery.stdin.write((json.dumps(command) + "\n").encode())
            self._nursery.stdin.flush()

    def _signal(self, incarnation: Incarnation, number: int) -> None:
        if incarnation.pid is not None and incarnation.status is None:
            # The nursery may have seen its end, which is still on the way to us: then there is no
            # such process.
            with contextlib.suppress(ProcessLookupError):
                os.kill(incarnation.pid, number)

    def _listen(self) -> None:
        if self._nursery.stdout is not None:
            with contextlib.suppress(ValueError, OSError):  # closed at the end
                for line in self._nursery.stdout:
                    self._answers.put(json.loads(line))
        self._answers.put({"gone": True})
