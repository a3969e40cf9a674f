"""A cloud in memory: jobs that somebody must move by hand, behind an API that can be disturbed."""

from __future__ import annotations

import copy
import itertools
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

PAGE = 5
"""How many runs one call lists."""
LOG_PAGE = 8
"""How many chunks of a log one call gives."""
CHUNK_BYTES = 16_384
"""How many bytes one chunk of a log has at most."""
OUTPUT_BYTES = 262_144
"""How much JSON a job may return."""
RETENTION = 86_400.0
"""Seconds for which a job that has ended is kept."""
GPUS = {"L4": 4, "H100": 8}
"""The models of GPUs there are, and how many of them one machine has."""


class CloudError(Exception):
    """What the API answers when it does not answer; ``code`` says why."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class Chunk:
    """Bytes of a log as a job wrote them: they begin and end anywhere, also within a character."""

    time: float
    attempt: int
    stream: str
    data: bytes


@dataclass
class Job:
    """One job; ``uid`` is what its creator has marked it with.

    ``status`` is QUEUED, RUNNING, SUCCEEDED, FAILED, TIMED_OUT or STOPPED.
    """

    body: dict[str, Any]
    uid: str
    number: int
    status: str = "QUEUED"
    stopping: bool = False
    attempt: int = 1
    failures: int = 0
    reason: str = ""
    exit_code: int | None = None
    signal: str | None = None
    error: str = ""
    outputs: dict[int, bytes] = field(default_factory=dict)  # attempt → JSON
    removing: bool = False
    started_at: float | None = None
    finished_at: float | None = None
    log: list[Chunk] = field(default_factory=list)

    @property
    def live(self) -> bool:
        """Whether it costs money."""
        return self.status in {"QUEUED", "RUNNING"}


class ToyCloud:
    """Jobs by name.

    The methods of the first part are its API, the others move the world. Safe between threads.

    Args:
        clock: The time in seconds.
        gang: Whether the jobs of a run are stopped, and fail, together.
        account: Whose jobs these are.
    """

    def __init__(
        self, clock: Callable[[], float], *, gang: bool = False, account: str = "mine"
    ) -> None:
        self.clock = clock
        self.gang = gang
        self.account = account
        self.jobs: dict[str, Job] = {}
        self.secrets: dict[str, str] = {}
        self.made: list[dict[str, Any]] = []
        self.calls = 0
        self.faults: dict[str, tuple[str, int]] = {}  # operation → error, and calls to let through
        self.between: Callable[[], None] | None = None  # what happens after the next page of a list
        self._numbers = itertools.count()
        self._lock = threading.RLock()

    # --- the API ---

    def create(self, name: str, body: dict[str, Any], uid: str) -> None:
        """Create a job; its name must be new, or taken by this very uid, whose answer was lost."""
        with self._lock:
            ambiguous = self._call("launch")
            if missing := [ref for ref in body["secrets"].values() if ref not in self.secrets]:
                raise CloudError(f"NoSuchSecret {missing[0]}")
            if name not in self.jobs:
                self.jobs[name] = Job(copy.deepcopy(body), uid, next(self._numbers))
                self.made.append(body)
            elif self.jobs[name].uid != uid:
                raise CloudError("BeingRemoved" if self.jobs[name].removing else "AlreadyExists")
            if ambiguous:
                raise CloudError("ConnectionCut")

    def describe(self, run_id: str) -> dict[str, Job]:
        """The jobs of a run as they are now, by name."""
        with self._lock:
            self._call("observe")
            jobs = {name: job for name, job in self.jobs.items() if job.body["run_id"] == run_id}
            return {name: copy.copy(job) for name, job in jobs.items()}

    def runs(self, after: int = -1, having: str = "run_id") -> tuple[list[str], int | None]:
        """A page of runs whose jobs have something of this name, and where the next page begins."""
        with self._lock:
            self._call("observe")
            first: dict[str, int] = {}
            for job in (job for job in self.jobs.values() if having in job.body):
                run_id = job.body["run_id"]
                first[run_id] = min(job.number, first.get(run_id, job.number))
            rest = sorted((number, run_id) for run_id, number in first.items() if number > after)
            page = [run_id for _, run_id in rest[:PAGE]]
            action, self.between = self.between, None
            if action is not None:
                action()
            return page, rest[PAGE - 1][0] if len(rest) > PAGE else None

    def stop(self, name: str, uid: str) -> None:
        """Begin to end a job, or in a gang all jobs of its run."""
        with self._lock:
            self._call("cancel")
            run_id = self._job(name, uid).body["run_id"]
            for other, job in self.jobs.items():
                if job.live and (other == name or (self.gang and job.body["run_id"] == run_id)):
                    job.stopping = True

    def log(self, name: str, uid: str, start: int = 0) -> list[Chunk]:
        """A page of the log of a job, from a chunk on; if it is full, there may be more."""
        with self._lock:
            self._call("logs")
            return self._job(name, uid).log[start : start + LOG_PAGE]

    def delete(self, name: str, uid: str) -> None:
        """Remove a job and its log; if it has not ended, it is ended."""
        with self._lock:
            self._call("cancel" if self._job(name, uid).live else "purge")
            del self.jobs[name]

    def _job(self, name: str, uid: str) -> Job:
        if name not in self.jobs or self.jobs[name].uid != uid:
            raise CloudError("NotFound")
        return self.jobs[name]

    def _call(self, operation: str) -> bool:
        """Count a call; raise if it is to be disturbed; True if its answer is to be lost."""
        self.calls += 1
        if operation not in self.faults:
            return False
        code, after = self.faults[operation]
        if after:
            self.faults[operation] = (code, after - 1)
            return False
        if code in {"Ambiguous", "Unanswered"}:
            if code == "Ambiguous":
                del self.faults[operation]
            return True
        raise CloudError(code)

    # --- the world ---

    def find(self, names: Mapping[str, str]) -> Job | None:
        """The job of a handle's metadata, if it is still there."""
        job = self.jobs.get(names["name"])
        return job if job is not None and job.uid == names["uid"] else None

    def start(self, name: str) -> None:
        """A job's program runs."""
        job = self.jobs[name]
        job.status, job.started_at, job.reason = "RUNNING", self.clock(), ""

    def write(self, name: str, data: bytes, stream: str = "stdout") -> None:
        """A job's program writes."""
        job = self.jobs[name]
        for begin in range(0, len(data), CHUNK_BYTES):
            piece = data[begin : begin + CHUNK_BYTES]
            job.log.append(Chunk(self.clock(), job.attempt, stream, piece))

    def preempt(self, name: str, output: Any = None) -> None:
        """A job's machine is taken away; what has just returned is lost, and the job waits."""
        job = self.jobs[name]
        if output is not None:
            job.outputs[job.attempt] = json.dumps(output).encode()
        self._again(job, "Preempted")

    def foreign(self, run_id: str) -> None:
        """Somebody else's job, which happens to have this name."""
        body = {"run_id": run_id, "timeout": None, "restarts": 0, "secrets": {}}
        self.jobs[f"{run_id}-0"] = Job(body, "somebody else's", next(self._numbers))

    def remove(self, run_id: str) -> None:
        """Somebody removes all jobs of a run, which takes until everything has settled."""
        for job in self.jobs.values():
            job.removing |= job.body["run_id"] == run_id

    def succeed(self, name: str, output: Any) -> None:
        """A job's program returns; if that is too much, its runner says so and fails."""
        text = json.dumps(output, separators=(",", ":")).encode()
        if len(text) > OUTPUT_BYTES:
            error = f"the result is {len(text)} bytes of JSON, and this cloud keeps {OUTPUT_BYTES}"
            self.end(name, "FAILED", 1, error=error)
        else:
            job = self.jobs[name]
            job.outputs[job.attempt] = text
            self.end(name, "SUCCEEDED", 0)

    def end(self, name: str, status: str, exit_code: int, **why: str) -> None:
        """An attempt ends; a failed one is followed by the next if allowed. The last ends gangs."""
        job = self.jobs[name]
        failed = status in {"FAILED", "TIMED_OUT"} and not job.stopping
        if failed and job.failures < job.body["restarts"]:
            job.failures += 1
            self._again(job, "")
            return
        self._end(job, status, exit_code, **why)
        if self.gang and failed:
            for other in self.jobs.values():
                if other.live and other.body["run_id"] == job.body["run_id"]:
                    other.reason, other.stopping = "GangFailed", True

    def stop_from_outside(self, name: str) -> None:
        """Somebody stops a job at the console; in a gang all jobs of its run."""
        run_id = self.jobs[name].body["run_id"]
        for other, job in self.jobs.items():
            if job.live and (other == name or (self.gang and job.body["run_id"] == run_id)):
                self._end(job, "STOPPED", 143, reason="StoppedAtTheConsole", signal="SIGTERM")

    def settle(self) -> None:
        """What is to end has ended, and what is being removed is gone."""
        self.jobs = {name: job for name, job in self.jobs.items() if not job.removing}
        for job in self.jobs.values():
            if job.live and job.stopping:
                gang = job.reason == "GangFailed"
                status, why = ("FAILED", "GangFailed") if gang else ("STOPPED", "")
                self._end(job, status, 143, reason=why, signal="SIGTERM")

    def pass_time(self) -> None:
        """What is overdue has ended, and what ended long ago is gone."""
        now = self.clock()
        for name, job in list(self.jobs.items()):
            limit = job.body["timeout"]
            since = now if job.started_at is None else job.started_at
            if job.live and limit is not None and now - since > limit:
                self.end(name, "TIMED_OUT", 124)
            elif job.finished_at is not None and now - job.finished_at > RETENTION:
                del self.jobs[name]

    def _again(self, job: Job, reason: str) -> None:
        job.status, job.started_at, job.reason = "QUEUED", None, reason
        job.attempt += 1

    def _end(
        self,
        job: Job,
        status: str,
        exit_code: int,
        *,
        reason: str = "",
        signal: str | None = None,
        error: str = "",
    ) -> None:
        job.status, job.exit_code, job.reason = status, exit_code, reason
        job.signal, job.error, job.stopping, job.finished_at = signal, error, False, self.clock()
