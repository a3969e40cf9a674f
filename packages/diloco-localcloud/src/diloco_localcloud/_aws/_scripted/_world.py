"""The training jobs and the clock that a test moves."""

from __future__ import annotations

from ..._server._clock import Clock
from .._training._region import Region, TrainingHabits
from ._job import ScriptedTrainingJob


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
