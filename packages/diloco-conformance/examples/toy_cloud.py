"""A cloud in memory: jobs that somebody must move by hand, behind an API that can be disturbed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class CloudError(Exception):
    """What the API answers when it does not answer; ``code`` says why."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass
class Job:
    """One job. ``status`` is QUEUED, RUNNING, SUCCEEDED, FAILED, TIMED_OUT or STOPPED."""

    body: dict[str, Any]
    order: int
    status: str = "QUEUED"
    stopping: bool = False
    attempt: int = 1
    reason: str = ""
    exit_code: int | None = None
    output: Any = None
    started_at: float | None = None
    log: list[str] = field(default_factory=list)

    @property
    def live(self) -> bool:
        """Whether it costs money."""
        return self.status in {"QUEUED", "RUNNING"}

    def end(
        self, status: str, exit_code: int | None = None, output: Any = None, reason: str = ""
    ) -> None:
        """It has ended."""
        self.status, self.exit_code, self.output, self.reason, self.stopping = (
            status,
            exit_code,
            output,
            reason,
            False,
        )


class ToyCloud:
    """Jobs by name. The methods of the first part are its API, the others move the world."""

    def __init__(self, clock: Callable[[], float], *, gang: bool = False) -> None:
        self.clock = clock
        self.gang = gang
        self.jobs: dict[str, Job] = {}
        self.made: list[dict[str, Any]] = []
        self.calls = 0
        self.fault: tuple[str, str, int] | None = None
        self._lock = threading.RLock()

    # --- the API ---

    def create(self, name: str, body: dict[str, Any]) -> None:
        """Create a job; its name must be new."""
        with self._lock:
            ambiguous = self._call("launch")
            if name in self.jobs:
                raise CloudError("AlreadyExists")
            self.jobs[name] = Job(body, len(self.made))
            self.made.append(body)
            if ambiguous:
                raise CloudError("ConnectionCut")

    def describe(self, run_id: str) -> dict[str, Job]:
        """The jobs of a run, by name."""
        with self._lock:
            self._call("observe")
            return {name: job for name, job in self.jobs.items() if job.body["run_id"] == run_id}

    def runs(self) -> list[str]:
        """The runs there are, oldest first."""
        with self._lock:
            self._call("observe")
            jobs = sorted(self.jobs.values(), key=lambda job: job.order)
            return list(dict.fromkeys(job.body["run_id"] for job in jobs))

    def stop(self, name: str) -> None:
        """Begin to end a job, or in a gang all jobs of its run."""
        with self._lock:
            self._call("cancel")
            if name not in self.jobs:
                raise CloudError("NotFound")
            run_id = self.jobs[name].body["run_id"]
            for other, job in self.jobs.items():
                if job.live and (other == name or (self.gang and job.body["run_id"] == run_id)):
                    job.stopping = True

    def delete(self, run_id: str) -> None:
        """Remove the records of a run."""
        with self._lock:
            self._call("delete")
            self.jobs = {
                name: job for name, job in self.jobs.items() if job.body["run_id"] != run_id
            }

    def _call(self, operation: str) -> bool:
        """Count a call; raise if it is to be disturbed; True if its answer is to be lost."""
        self.calls += 1
        if self.fault is None or self.fault[0] != operation:
            return False
        _, code, after = self.fault
        if after:
            self.fault = (operation, code, after - 1)
            return False
        if code == "Ambiguous":
            self.fault = None
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
    ) -> None:
        """A job ends; in a gang a failure ends the others too, a little later."""
        self.jobs[name].end(status, exit_code, output, reason)
        if self.gang and status == "FAILED":
            for job in self.jobs.values():
                if job.live and job.body["run_id"] == self.jobs[name].body["run_id"]:
                    job.reason = "GangFailed"

    def settle(self) -> None:
        """What is to end has ended."""
        for job in self.jobs.values():
            if job.live and job.reason == "GangFailed":
                job.end("FAILED", 143, reason="GangFailed")
            elif job.live and job.stopping:
                job.end("STOPPED", 143)

    def pass_time(self) -> None:
        """What is overdue has ended."""
        for job in self.jobs.values():
            if (
                job.live
                and job.started_at is not None
                and self.clock() - job.started_at > job.body["timeout"]
            ):
                job.end("TIMED_OUT", 124)
