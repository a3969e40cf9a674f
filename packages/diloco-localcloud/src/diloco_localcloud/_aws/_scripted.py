"""Training jobs and a clock that a test moves."""

from __future__ import annotations

from typing import Any

from .._server._timeline import Clock
from ._training._job import Job
from ._training._region import KILL_SECONDS, NO_CAPACITY, Region, TrainingHabits

Json = dict[str, Any]


class ScriptedTrainingJob:
    """A training job that a test moves.

    A call that does not fit the job's state (a start after the end) does nothing.

    Thread-safe.
    """

    def __init__(self, region: Region, job: Job) -> None:
        self._region = region
        self._job = job

    @property
    def name(self) -> str:
        """Return its TrainingJobName."""
        return self._job.name

    @property
    def json(self) -> Json:
        """Return the answer of DescribeTrainingJob, with times in seconds since the epoch."""
        with self._region.lock:
            return self._job.description()

    @property
    def status(self) -> tuple[str, str]:
        """Return its TrainingJobStatus and its SecondaryStatus."""
        with self._region.lock:
            return self._job.status, self._job.secondary

    def wait_for_capacity(self) -> None:
        """Make the job wait for instances, with the secondary status Pending."""
        with self._region.lock:
            if self.status[0] == "InProgress" and self._job.secondary != "Pending":
                self._job.move(self._region.timeline.now(), "Pending")

    def start(self) -> None:
        """Make the job train from now on."""
        with self._region.lock:
            self._region.start(self._job)

    def succeed(self) -> None:
        """Make its program exit with 0; the job is Completed after its upload."""
        with self._region.lock:
            self._region.finish(self._job)

    def fail(self, exit_code: int = 1, message: str = "") -> None:
        """Make its program exit with a code other than 0.

        ``message`` is what the program wrote to ``/opt/ml/output/failure``.
        """
        end = f", exit code: {exit_code}"
        with self._region.lock:
            self._region.finish(self._job, f"AlgorithmError: {message[: 1008 - len(end)]}{end}")

    def break_down(
        self,
        reason: str = "InternalServerError: We encountered an internal error. Please try again.",
    ) -> None:
        """Fail the job as SageMaker does, with a FailureReason of SageMaker's own.

        After an internal error it begins again, if its RetryStrategy allows another attempt.
        """
        with self._region.lock:
            self._region.finish(self._job, reason)

    def capacity_error(self) -> None:
        """Fail the job because there are no instances for it."""
        with self._region.lock:
            self._region.finish(self._job, NO_CAPACITY)

    def interrupt(self) -> None:
        """Take its spot instances away; ``start``, or ``world.auto_start``, makes it run again.

        Raises:
            ValueError: the job does not run on spot.
        """
        with self._region.lock:
            self._region.interrupt(self._job)

    def log(self, text: str) -> None:
        """Write lines to its log, now.

        Each attempt has a stream of its own, named after the moment at which it began.
        """
        with self._region.lock:
            starts = [
                step["StartTime"] for step in self._job.transitions if step["Status"] == "Training"
            ]
            began = int(starts[-1] if starts else self._job.created)
            now = self._region.timeline.now()
            self._region.logs.write(f"{self.name}/algo-1-{began}", now, text)

    def on_term(self, after: float = 1.0) -> None:
        """Set how many seconds its program takes to end after SIGTERM; after 120 it is killed."""
        with self._region.lock:
            self._job.term_seconds = after

    def ignore_term(self) -> None:
        """Make its program ignore SIGTERM."""
        self.on_term(KILL_SECONDS)

    def stop(self) -> None:
        """Stop the job as a user with the console does; do nothing if it has ended."""
        with self._region.lock:
            if self._job.status == "InProgress":
                self._region.stop(self._job)


class TrainingWorld(Clock):
    """The jobs and the clock of a stand-in, as a test moves them; thread-safe.

    In real time the clock cannot be moved: ``advance``, ``settle`` and ``step`` raise ValueError.

    Attributes:
        habits: how SageMaker behaves: quotas, capacity, rates, lags, delays.
    """

    def __init__(self, region: Region) -> None:
        super().__init__(region.timeline, region.lock)
        self._region = region
        self.habits: TrainingHabits = region.habits

    def jobs(self, contains: str = "") -> list[ScriptedTrainingJob]:
        """Return the training jobs that exist and whose names contain a text, oldest first."""
        with self._region.lock:
            kept = [job for name, job in self._region.jobs.items() if contains in name]
            return [ScriptedTrainingJob(self._region, job) for job in kept]

    def job(self, name: str) -> ScriptedTrainingJob:
        """Return a training job by its name.

        Raises:
            LookupError: there is no such job.
        """
        with self._region.lock:
            job = self._region.jobs.get(name)
            if job is None:
                names = ", ".join(self._region.jobs) or "none"
                raise LookupError(f"there is no training job {name!r}; there are: {names}")
            return ScriptedTrainingJob(self._region, job)
