"""One training job in the hands of a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._training._region import KILL_SECONDS

if TYPE_CHECKING:
    from .._training._job import Job
    from .._training._region import Region

Json = dict[str, Any]


class ScriptedTrainingJob:
    """What a test may do with a training job.

    What does not fit its state (a start after the end) does nothing.

    Thread-safe.
    """

    def __init__(self, region: Region, job: Job) -> None:
        self._region = region
        self._job = job

    @property
    def name(self) -> str:
        """TrainingJobName."""
        return self._job.name

    @property
    def json(self) -> Json:
        """What DescribeTrainingJob tells, with times in seconds since the epoch."""
        with self._region.lock:
            return self._job.description()

    @property
    def status(self) -> tuple[str, str]:
        """Its TrainingJobStatus and its SecondaryStatus."""
        with self._region.lock:
            return self._job.status, self._job.secondary

    def wait_for_capacity(self) -> None:
        """It waits for instances, and says so: secondary status Pending."""
        with self._region.lock:
            if self.status[0] == "InProgress" and self._job.secondary != "Pending":
                self._job.move(self._region.timeline.now(), "Pending")

    def download(self) -> None:
        """It has instances, and downloads its image."""
        with self._region.lock:
            if self.status[0] == "InProgress" and self._job.secondary != "Downloading":
                self._job.move(self._region.timeline.now(), "Downloading")

    def start(self) -> None:
        """It trains from now on."""
        with self._region.lock:
            self._region.start(self._job)

    def succeed(self) -> None:
        """Its program exits with 0; the job is Completed after its upload."""
        with self._region.lock:
            self._region.finish(self._job)

    def fail(self, exit_code: int = 1, message: str = "") -> None:
        """Its program exits with another code; ``message`` is what it wrote to ``/opt/ml/output/failure``."""
        end = f", exit code: {exit_code}"
        with self._region.lock:
            self._region.finish(self._job, f"AlgorithmError: {message[: 1008 - len(end)]}{end}")

    def break_down(
        self,
        reason: str = "InternalServerError: We encountered an internal error. Please try again.",
    ) -> None:
        """SageMaker fails it with a FailureReason of its own; after an internal error it begins again, if it may."""
        with self._region.lock:
            self._region.finish(self._job, reason)

    def capacity_error(self) -> None:
        """There are no instances for it."""
        with self._region.lock:
            self._region.lack_capacity(self._job)

    def interrupt(self) -> None:
        """Its spot instances are taken away; ``start``, or ``world.auto_start``, has it run again.

        Raises:
            ValueError: it does not run on spot.
        """
        with self._region.lock:
            self._region.interrupt(self._job)

    def restart(self) -> None:
        """SageMaker begins it again after an error of its own: secondary status Restarting."""
        with self._region.lock:
            self._region.restart(self._job)

    def log(self, text: str) -> None:
        """Write lines to its log, now.

        Each attempt has a stream of its own, named after the moment in which it began.
        """
        with self._region.lock:
            starts = [
                each["StartTime"] for each in self._job.transitions if each["Status"] == "Training"
            ]
            began = int(starts[-1] if starts else self._job.created)
            now = self._region.timeline.now()
            self._region.logs.write(f"{self.name}/algo-1-{began}", now, text)

    def on_term(self, after: float = 1.0) -> None:
        """How long its program takes to end after SIGTERM, in seconds; after 120 it is killed."""
        with self._region.lock:
            self._job.term_seconds = after

    def ignore_term(self) -> None:
        """Its program does not answer SIGTERM."""
        self.on_term(KILL_SECONDS)

    def stop(self) -> None:
        """Somebody stops it, as with the console; nothing if it has ended."""
        with self._region.lock:
            if self._job.status == "InProgress":
                self._region.stop(self._job)
