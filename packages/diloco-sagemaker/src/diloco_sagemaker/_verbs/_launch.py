"""Create the jobs of a run: all or none, and each exactly once, even if answers are lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from diloco_protocol import (
    BackendError,
    QuotaExceededError,
    RunConflictError,
    ThrottledError,
    UnavailableError,
)

from .._client._errors import MissingError, TakenError, UnreachedError
from .._client._parallel import AT_ONCE
from .._request import _names as names
from .._state._facts import ENDED, JobFacts, Summary, same_life
from ._runs import Runs

_TAKEN_BACK = frozenset({"Stopping", "Stopped", "Deleting"})
_OVER = ENDED | _TAKEN_BACK
"""Statuses of a job that has ended or is about to; one that is not known counts as running."""


class Made(Enum):
    """The state of the job that a request is for, as far as it is known."""

    NOTHING = auto()
    OURS = auto()
    """It was created by this launch."""
    UNSURE = auto()
    """It was requested, and the answer was lost."""
    THERE = auto()
    """It existed before, and belongs to the same launch."""


@dataclass(slots=True)
class Launch:
    """The state of one launch.

    Attributes:
        requests: The requests of the jobs to create, by job name, in rank order.
        launch_id: The id that each of these jobs carries, and no job of another launch, even if
            that has the same fingerprint.
        began: When it began, by the backoff's clock.
        made: The state of each job so far.
        met: The jobs of :attr:`Made.THERE` that had not ended when they were met. Until it is known
            which launch they belong to, all jobs with these names that are in a list.
        over: A job of :attr:`Made.THERE` that had ended.
    """

    requests: dict[str, dict[str, Any]] = field(repr=False)
    launch_id: str
    began: float
    made: dict[str, Made] = field(default_factory=dict)
    met: dict[str, Summary] = field(default_factory=dict)
    over: JobFacts | None = None

    def of(self, job_name: str) -> Made:
        """Return the known state of a job."""
        return self.made.get(job_name, Made.NOTHING)

    def left(self) -> list[str]:
        """List the jobs that are still to be created, in rank order."""
        done = {Made.OURS, Made.THERE}
        return [name for name in self.requests if self.of(name) not in done]

    def mine(self) -> list[str]:
        """List the jobs that this launch has created, or may have created."""
        return [name for name in self.requests if self.of(name) in {Made.OURS, Made.UNSURE}]

    def meet(self, job: JobFacts) -> None:
        """Record that a job of this launch existed before."""
        self.made[job.name] = Made.THERE
        if job.status in _OVER:
            self.over = job
        else:
            self.met[job.name] = job

    def check_met(self, job_name: str, now: Summary | None) -> None:
        """Refuse a job that was ended meanwhile, if it was alive when it was met or was created.

        Raises:
            RunConflictError: It is being ended; or it was met, and is gone; or it was created, and
                its name is another launch's.
        """
        met = self.met.get(job_name)
        ended = now is not None and now.status in _TAKEN_BACK
        if met is not None:
            taken = now is not None and not same_life(met.created, now.created)
            ended |= now is None
            which = "another launch of this run"
        else:
            taken = isinstance(now, JobFacts) and now.launch != self.launch_id
            which = "this launch"
        if not (ended or taken) or (met is None and self.of(job_name) is not Made.OURS):
            return
        self.met.pop(job_name, None)
        text = f"the training job {job_name}, which {which} had created, was ended meanwhile"
        if taken:
            raise RunConflictError(
                f"{text}, and its name is another launch's: choose another run_id"
            )
        run_id, _ = names.parse_job_name(job_name) or ("", -1)
        raise RunConflictError(
            f"{text}: its launch was interrupted, or the run was cancelled. Before you "
            f"launch it again, end what is left of it with cancel_run({run_id!r}), and purge it"
        )

    def fingerprint(self, job_name: str) -> str:
        """Return the fingerprint that a job of this launch carries."""
        return str(self.requests[job_name]["HyperParameters"][names.FINGERPRINT])


class Launcher:
    """Creates the jobs of runs."""

    def __init__(self, runs: Runs) -> None:
        self._client, self._jobs = runs.client, runs.jobs
        self._backoff, self._patiently = runs.backoff, runs.patiently
        self._patience = runs.options.retry_timeout

    def _look(self, launch: Launch, run_id: str) -> None:
        """Find out what an earlier try has created; creates nothing.

        Raises:
            RunConflictError: Jobs of another launch have this run's names, or jobs of the run are
                being deleted.
            BackendError: SageMaker could not be asked.
        """
        jobs = self._patiently(lambda: self._jobs.of_run(run_id))
        if not jobs:
            return
        alive = [job for job in jobs.values() if job.status not in _OVER]
        launch.met = {job.name: job for job in alive if job.name in launch.requests}
        details = self._patiently(
            lambda: self._jobs.details(list(jobs.values()), names.job_prefix(run_id))
        )
        launch.met = {}
        self._meet_all(launch, details.values())
        self._check_complete(launch)

    def _check_complete(self, launch: Launch) -> None:
        """Refuse to complete a run of which a job has ended.

        In such a run, an earlier try was taken back, or a purge was interrupted.
        """
        over = launch.over
        if over is None:
            return
        if not (left := launch.mine()):
            # A list may lack jobs that have just been created.
            left_out = self._patiently(lambda: self._jobs.described(launch.left()))
            self._meet_all(launch, left_out.values())
            left = launch.left()
        if left:
            raise RunConflictError(
                f"the training job {over.name} of an earlier try of this launch is over, and "
                f"{left[0]} was not there: end what runs with cancel_run({over.run_id!r}), and "
                f"purge that run, which attach({over.run_id!r}) finds, or choose another run_id"
            )

    def _meet_all(self, launch: Launch, jobs: Iterable[JobFacts]) -> None:
        """Record all jobs that are of this launch, and only then refuse one that is not."""
        conflicts = []
        for job in jobs:
            if job.run_id or job.name in launch.requests:  # other jobs do not matter
                try:
                    self._check_same(launch, job)
                except RunConflictError as error:
                    conflicts.append(error)
                else:
                    launch.meet(job)
        if conflicts:
            raise conflicts[0]

    def create(self, launch: Launch, run_id: str, quota_patience: float) -> None:
        """Find out what an earlier try has created, and create what is missing.

        The first job is created alone: of two launches at the same time, the second one finds it
        and creates nothing.

        Args:
            launch: The launch to complete.
            run_id: Its run.
            quota_patience: Seconds for which to wait for quota.

        Raises:
            BackendError: Not everything could be created; ``withdraw`` ends what was.
        """
        self._look(launch, run_id)
        pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="diloco-sagemaker")
        try:
            self._create(launch, pool, quota_patience)
        finally:
            # Also after Ctrl-C: wait for the calls under way, so that their results are known.
            pool.shutdown(wait=True, cancel_futures=True)

    def _create(self, launch: Launch, pool: ThreadPoolExecutor, quota_patience: float) -> None:
        clock = self._backoff.clock
        window, delays = 1, self._backoff.delays()
        deadline = clock() + self._patience
        quota_deadline = clock() + quota_patience
        while left := launch.left():
            batch = left[:window]
            futures = [pool.submit(self._try, launch, name) for name in batch]
            errors = [error for future in futures if (error := future.result()) is not None]
            self._check_complete(launch)  # the list may have lacked a job that has ended
            waits = self._may_wait(errors, deadline, quota_deadline)
            went_well = len(batch) - len(errors)
            if went_well:
                delays = self._backoff.delays()
                deadline = clock() + self._patience
            if not waits:
                window = min(AT_ONCE, window + max(1, went_well))
                continue
            window = max(1, went_well)
            pause = next(delays)
            pauses = [
                error.retry_after or 0.0 for error in waits if isinstance(error, ThrottledError)
            ]
            self._backoff.sleep(max([pause, *pauses]))

    def _may_wait(
        self, errors: Sequence[BackendError], deadline: float, quota_deadline: float
    ) -> Sequence[BackendError]:
        """Return the errors if all of them allow another try; raise the first that does not."""
        now = self._backoff.clock()
        for error in errors:
            until = quota_deadline if isinstance(error, QuotaExceededError) else deadline
            may_pass = error.retryable or isinstance(error, QuotaExceededError)
            wanted = error.retry_after if isinstance(error, ThrottledError) else None
            if not may_pass or now + (wanted or 0.0) >= until:
                raise error
        return errors

    def _try(self, launch: Launch, name: str) -> BackendError | None:
        """Try once to create a job; return the error, or None if it was created or met."""
        before = launch.of(name)
        # From now on the job may exist, even if this thread is interrupted.
        launch.made[name] = Made.UNSURE
        try:
            self._client.create(launch.requests[name])
        except TakenError:
            return self._meet(launch, name, before)  # this call has created nothing
        except UnreachedError as error:
            launch.made[name] = before
            return error
        except UnavailableError as error:
            return error
        except BackendError as error:
            launch.made[name] = before
            return error
        launch.made[name] = Made.OURS
        return None

    def _meet(self, launch: Launch, name: str, otherwise: Made) -> BackendError | None:
        """Look at the job that already has this name, and record it if it is of this launch.

        It may be this launch's own, if an answer was lost (also to a client that was handed in, and
        that has tried again itself); or that of another launch with the same fingerprint; or that
        of a different launch. Where that cannot be known, its state is ``otherwise``.
        """
        try:
            job = self._client.describe(name)
        except MissingError as error:
            return UnavailableError(
                f"{error}, although its name is taken: it is about to appear, or to go"
            )
        except BackendError as error:
            launch.made[name] = otherwise
            return error
        try:
            self._check_same(launch, job)
        except RunConflictError as error:
            launch.made[name] = Made.NOTHING
            return error
        if job.launch == launch.launch_id:
            launch.made[name] = Made.OURS
        else:
            launch.meet(job)
        return None

    def _check_same(self, launch: Launch, job: JobFacts) -> None:
        if job.status == "Deleting":
            raise RunConflictError(
                f"the training job {job.name} is being deleted: wait until it is gone, or choose "
                "another run_id"
            )
        if job.name not in launch.requests:
            whose = "which is not part of this launch"
            how = f"; attach({job.run_id!r}) finds a run again"
        elif not job.run_id:
            whose, how = "that was not launched by diloco", ""
        elif job.fingerprint != launch.fingerprint(job.name):
            whose = "of another launch, whose arguments or options were different"
            how = f", or purge that run first, which attach({job.run_id!r}) finds"
        else:
            return
        raise RunConflictError(
            f"there is a training job {job.name} already, {whose}: choose another run_id{how}"
        )
