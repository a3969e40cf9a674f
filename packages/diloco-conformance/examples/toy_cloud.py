"""A cloud in memory: jobs that somebody must move by hand, behind an API that can be disturbed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

#: Seconds for which the records of a run are kept after its end.
RETENTION = 86_400.0


class CloudError(Exception):
    """What the API answers when it does not answer; ``code`` says why."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass
class Job:
    """One job. ``status`` is QUEUED, RUNNING, SUCCEEDED, FAILED, TIMED_OUT or STOPPED."""

    body: dict[str, Any]
    uid: str
    status: str = "QUEUED"
    stopping: bool = False
    attempt: int = 1
    reason: str = ""
    exit_code: int | None = None
    signal: str | None = None
    output: Any = None
    started_at: float | None = None
    finished_at: float | None = None
    log: list[str] = field(default_factory=list)

    @property
    def live(self) -> bool:
        """Whether it costs money."""
        return self.status in {"QUEUED", "RUNNING"}


class ToyCloud:
    """Jobs by name, oldest first. The methods of the first part are its API, the others move the world."""

    def __init__(
        self, clock: Callable[[], float], *, gang: bool = False, account: str = "mine"
    ) -> None:
        self.clock = clock
        self.gang = gang
        self.account = account
        self.jobs: dict[str, Job] = {}
        self.made: list[dict[str, Any]] = []
        self.calls = 0
        self.faults: dict[str, tuple[str, int]] = {}  # operation → error, and calls to let through
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()

    # --- the API ---

    def create(self, name: str, body: dict[str, Any]) -> str:
        """Create a job; its name must be new. Gives its uid, which no other job ever has."""
        with self._lock:
            ambiguous = self._call("launch")
            if name in self.jobs:
                raise CloudError("AlreadyExists")
            self.jobs[name] = Job(body, f"{self.account}-{next(self._numbers)}")
            self.made.append(body)
            if ambiguous:
                raise CloudError("ConnectionCut")
            return self.jobs[name].uid

    def describe(self, run_id: str, operation: str = "observe") -> dict[str, Job]:
        """The jobs of a run, by name."""
        with self._lock:
            self._call(operation)
            return {
                name: replace(job)
                for name, job in self.jobs.items()
                if job.body["run_id"] == run_id
            }

    def runs(self) -> list[str]:
        """The runs there are, oldest first."""
        with self._lock:
            self._call("find")
            return list(dict.fromkeys(job.body["run_id"] for job in self.jobs.values()))

    def stop(self, name: str, uid: str) -> None:
        """Begin to end a job, or in a gang all jobs of its run."""
        with self._lock:
            self._call("cancel")
            if name not in self.jobs or self.jobs[name].uid != uid:
                raise CloudError("NotFound")
            run_id = self.jobs[name].body["run_id"]
            for other, job in self.jobs.items():
                if job.live and (other == name or (self.gang and job.body["run_id"] == run_id)):
                    job.stopping = True

    def delete(self, run_id: str) -> None:
        """Remove the records of a run."""
        with self._lock:
            self._call("purge")
            self.jobs = {
                name: job for name, job in self.jobs.items() if job.body["run_id"] != run_id
            }

    def _call(self, operation: str) -> bool:
        """Count a call; raise if it is to be disturbed; True if its answer is to be lost."""
        self.calls += 1
        if operation not in self.faults:
            return False
        code, after = self.faults[operation]
        if after:
            self.faults[operation] = (code, after - 1)
            return False
        if code == "Ambiguous":
            del self.faults[operation]
            return True
        raise CloudError(code)

    # --- the world ---

    def end(
        self,
        name: str,
        status: str,
        exit_code: int | None = None,
        output: Any = None,
        reason: str = "",
        signal: str | None = None,
    ) -> None:
        """A job ends; in a gang a failure ends the others too, a little later."""
        job = self.jobs[name]
        job.status, job.exit_code, job.output, job.reason = status, exit_code, output, reason
        job.stopping, job.signal, job.finished_at = False, signal, self.clock()
        if self.gang and status == "FAILED":
            for other in self.jobs.values():
                if other.live and other.body["run_id"] == job.body["run_id"]:
                    other.reason = "GangFailed"

    def settle(self) -> None:
        """What is to end has ended."""
        for name, job in self.jobs.items():
            if job.live and job.reason == "GangFailed":
                self.end(name, "FAILED", 143, reason="GangFailed", signal="SIGTERM")
            elif job.live and job.stopping:
                self.end(name, "STOPPED", 143, signal="SIGTERM")

    def pass_time(self) -> None:
        """What is overdue has ended; what has ended long ago is forgotten."""
        now = self.clock()
        for name, job in self.jobs.items():
            begun, limit = job.started_at, job.body["timeout"]
            if job.live and begun is not None and limit is not None and now - begun > limit:
                self.end(name, "TIMED_OUT", 124)
        ended = {job.body["run_id"] for job in self.jobs.values()}
        for job in self.jobs.values():
            if job.finished_at is None or now - job.finished_at <= RETENTION:
                ended.discard(job.body["run_id"])
        self.jobs = {
            name: job for name, job in self.jobs.items() if job.body["run_id"] not in ended
        }
