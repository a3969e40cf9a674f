"""The training jobs and the clock that a test moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._job import ScriptedTrainingJob

if TYPE_CHECKING:
    from ..._server._timeline import Timeline
    from .._training._region import Region, TrainingHabits


class TrainingWorld:
    """The jobs and the clock of a stand-in, as a test moves them; thread-safe.

    In real time the clock cannot be moved: ``advance``, ``settle`` and ``step`` raise ValueError.

    Attributes:
        habits: how SageMaker behaves: quotas, capacity, rates, lags, delays.
    """

    def __init__(self, region: Region) -> None:
        self._region = region
        self.habits: TrainingHabits = region.habits

    def now(self) -> float:
        """Return the time of the virtual clock, in seconds since the epoch."""
        with self._region.lock:
            return self._region.timeline.now()

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass, and do whatever falls due meanwhile."""
        with self._region.lock:
            timeline = self._virtual()
            timeline.run_until(timeline.now() + seconds)

    def settle(self, within: float = 2.0, most: float = 600.0) -> None:
        """Let time pass until nothing is due within the next ``within`` seconds.

        At most ``most`` seconds pass in all.
        """
        with self._region.lock:
            timeline = self._virtual()
            end = timeline.now() + most
            while (due := timeline.next_due()) is not None and due <= min(
                timeline.now() + within, end
            ):
                timeline.run_until(due)

    def step(self) -> bool:
        """Do the next thing that is due, however late; return False if nothing is due at all."""
        with self._region.lock:
            return self._virtual().step()

    def _virtual(self) -> Timeline:
        if not self._region.timeline.virtual:
            raise ValueError("the stand-in was made with real_time=True: its clock cannot be moved")
        return self._region.timeline

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
