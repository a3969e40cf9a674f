"""Runs that exist: find them, and look at their replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from diloco_protocol import (
    BackendError,
    Backoff,
    InvalidRequestError,
    Outcome,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaState,
    ReplicaStatus,
    ResultLostError,
    spec_from_environment,
)
from diloco_protocol.backend import Patiently, Recent

from .._client._calls import Client
from .._client._errors import MissingError, UnseenError
from .._client._jobs import Jobs
from .._client._parallel import outcomes
from .._request import _names as names
from .._request._options import SageMakerOptions
from .._state._facts import JobFacts, Summary
from .._state._handles import created_of, is_of, make_handle, may_be_of
from .._state._states import UnknownWordError, attempt_in, status_of
from ._results import read_outcome

_FEW = 2
"""The most replicas that are described one by one; for more, the jobs of their run are listed."""
_SECONDS_TO_APPEAR = 30.0
"""Seconds for which a new job may not be visible everywhere; AWS states no number.

Looks are tried again for longer than this.
"""
_SECONDS_TO_BE_LISTED = 3600.0
"""Seconds for which a list is assumed to lack jobs that were created; AWS states no number."""


class Runs:
    """The runs of an account and region, by their handles. Thread-safe."""

    def __init__(
        self,
        client: Client,
        jobs: Jobs,
        backoff: Backoff,
        options: SageMakerOptions,
        patiently: Patiently,
    ) -> None:
        self.client = client
        self.patiently = patiently
        self.jobs = jobs
        self.backoff = backoff
        self.options = options
        self._outcomes: Recent[tuple[str, int], tuple[Outcome | None]] = Recent()
        self.cancelled: Recent[tuple[str, int], bool] = Recent()
        self.seconds_to_appear = _SECONDS_TO_APPEAR
        self.launched_here: Recent[str, float] = Recent()

    # --- looking ---

    def job(self, handle: ReplicaHandle) -> JobFacts:
        """Return the job of a handle.

        Raises:
            ReplicaNotFoundError: It is gone.
            UnseenError: It is not found, and was created a moment ago.
            InvalidRequestError: It is of another account.
        """
        try:
            job = self.jobs.describe(handle.metadata["job_name"])
        except MissingError as error:
            self.check_account(handle, None)
            raise self._unseen(handle) or _gone(handle) from error
        self.check_account(handle, job)
        if not is_of(handle, job):
            raise _gone(handle)
        return job

    def rendezvous(self, handle: ReplicaHandle) -> str | None:
        """Return where a replica meets the others, by its job; raises as :meth:`job`."""
        created = self.job(handle).created
        job, strings = self.client.describe_with_hyperparameters(handle.metadata["job_name"])
        if job.created != created:
            raise _gone(handle)
        return spec_from_environment(strings).rendezvous_uri

    def check_account(self, handle: ReplicaHandle, job: JobFacts | None) -> None:
        """Refuse a handle of another account, for which "not found" would mean nothing.

        If its job was found, the job itself tells its account.
        """
        account = handle.metadata["account"]
        if job is not None and job.account == account:
            return
        if account != (client_account := self.client.account):
            raise InvalidRequestError(
                f"this handle is of the account {account}, and these credentials are of "
                f"{client_account}: use the former's"
            )

    def observe(self, handles: Sequence[ReplicaHandle]) -> dict[ReplicaHandle, ReplicaStatus]:
        """Return the statuses of replicas of one run, without those of which there is no record."""
        if len(handles) <= _FEW:
            jobs = self.jobs.described([handle.metadata["job_name"] for handle in handles])
        else:
            jobs = self._listed(handles)
        lacking, known = [], {}
        for handle in handles:
            job = jobs.get(handle.metadata["job_name"])
            self.check_account(handle, job)
            if job is None:
                lacking.append(handle)
            elif is_of(handle, job):
                known[handle] = job
        states = dict(zip(known, outcomes(self._status, list(known.values())), strict=True))
        # A job may be deleted while its run is observed: that says nothing about the others.
        lacking += [handle for handle, state in states.items() if isinstance(state, MissingError)]
        for handle in lacking:
            states.pop(handle, None)
            if (unseen := self._unseen(handle)) is not None:
                states[handle] = unseen
        errors = [state for state in states.values() if isinstance(state, BaseException)]
        for error in errors:
            # An unknown status, or a job that is not visible yet, concerns a single rank. It is
            # raised only if there is no rank without an error.
            if not isinstance(error, (UnknownWordError, UnseenError)) or len(errors) == len(states):
                raise error

        def shown_as(handle: ReplicaHandle, state: ReplicaStatus | BaseException) -> ReplicaStatus:
            if isinstance(state, UnseenError):
                return ReplicaStatus(ReplicaState.PENDING, message=str(state))
            if isinstance(state, BaseException):
                attempt = attempt_in(known[handle])
                return ReplicaStatus(ReplicaState.RUNNING, attempt, message=str(state))
            return state

        return {handle: shown_as(handle, state) for handle, state in states.items()}

    def _unseen(self, handle: ReplicaHandle) -> UnseenError | None:
        """Return the error for a job that is not found, if it may not be visible yet.

        None if the job is believed to be gone.
        """
        created, name = created_of(handle), handle.metadata["job_name"]
        if created is not None and self.jobs.is_removed(name, created):
            return None
        # This process may have launched the run, and knows when by its own clock; AWS's may differ.
        # A survivor's handle has no other time.
        times = [self.launched_here.get(handle.run_id), None if created is None else created / 1000]
        ages = [self.options.clock() - time for time in times if time is not None]
        if not ages or abs(age := min(ages, key=abs)) >= self.seconds_to_appear:
            return None
        return UnseenError(
            f"SageMaker says that there is no training job {name}, which was created {age:.0f} s "
            "ago: it may not be seen everywhere yet, and is believed to be gone only "
            f"{self.seconds_to_appear:.0f} s after that"
        )

    def _listed(self, handles: Sequence[ReplicaHandle]) -> dict[str, JobFacts]:
        run_id = handles[0].run_id
        times = [created_of(handle) for handle in handles]
        since = None if None in times else min(time for time in times if time is not None)
        listed = self.jobs.of_run(run_id, since)
        wanted = [
            summary
            for handle in handles
            if (summary := listed.get(handle.rank)) is not None and may_be_of(handle, summary)
        ]
        jobs = self.jobs.details(wanted, names.job_prefix(run_id))
        # A list may lack jobs that have just been created; only Describe can say that a job does
        # not exist.
        job_names = {handle.metadata["job_name"] for handle in handles}
        return {**jobs, **self.jobs.described(sorted(job_names - jobs.keys()))}

    def _status(self, job: JobFacts) -> ReplicaStatus:
        cancelled = False
        if job.status in {"Stopped", "Stopping"}:
            told = (job.name, job.created) in self.cancelled
            cancelled = told or self.jobs.is_tagged(job, names.TAG_CANCELLED)
        outcome = self._outcome(job) if job.status == "Completed" and job.restarts else None
        return status_of(job, self.client.region, outcome, cancelled=cancelled)

    def _outcome(self, job: JobFacts) -> Outcome | None:
        """Read the outcome of a job that restarts its program itself, for the attempt in it."""
        key = (job.name, job.created)
        kept = self._outcomes.get(key)
        if kept is None:
            try:
                outcome = read_outcome(self.client, job)
            except ResultLostError:
                kept = (None,)
            except BackendError:
                return None  # collecting the result will raise it; transitions show the attempt
            else:
                kept = (Outcome(0, attempt=outcome.attempt, started_at=outcome.started_at),)
            self._outcomes.keep(key, kept)
        return kept[0]

    def result(self, handle: ReplicaHandle) -> Any:
        """Return the result of a replica that has succeeded; raises as :func:`read_outcome`."""
        try:
            return read_outcome(self.client, self.job(handle)).result
        except ResultLostError as error:
            raise ResultLostError(
                f"rank {handle.rank} of run {handle.run_id!r} succeeded, but its result cannot be "
                f"read: {error}"
            ) from error

    # --- finding ---

    def find(self, run_id: str) -> list[ReplicaHandle]:
        """Return the handles of a run, in rank order.

        Raises:
            ReplicaNotFoundError: There is no such run.
            UnseenError: The run is not found, and was launched here a moment ago.
        """
        listed, run_jobs = self.all_of(run_id)
        if not run_jobs:
            if (
                abs(self.options.clock() - (self.launched_here.get(run_id) or 0.0))
                < self.seconds_to_appear
            ):
                raise UnseenError(
                    f"SageMaker shows no training job of the run {run_id!r}, which was launched "
                    "here a moment ago"
                )
            raise ReplicaNotFoundError(
                f"there is no run {run_id!r} in {self.client.region} that diloco has launched: "
                "list_runs() names those that there are"
            )
        # A run is one launch: jobs with another fingerprint came later, and belong to another run.
        first = run_jobs[0]
        region, account = self.client.region, first.account or self.client.account
        created = {
            job.rank: listed.get(job.rank, job).created
            for job in run_jobs
            if job.fingerprint == first.fingerprint
        }
        return [
            make_handle(run_id, rank, first.world_size, when, region, account)
            for rank, when in sorted(created.items())
        ]

    def all_of(self, run_id: str, *more: JobFacts) -> tuple[dict[int, Summary], list[JobFacts]]:
        """Return a run's entries in the list, and its jobs, the oldest first.

        The jobs include those that the list lacks, as it may for a while.
        """
        listed = self.jobs.of_run(run_id)
        by_name = self.jobs.details(list(listed.values()), names.job_prefix(run_id))
        by_name |= {job.name: job for job in more}
        run_jobs = [job for job in by_name.values() if job.run_id]
        newest = max((job.created / 1000 for job in run_jobs), default=math.inf)
        if not run_jobs:  # a launch creates its first job first
            first = self.jobs.described([names.job_name(run_id, 0)])
            by_name |= first
            run_jobs = [job for job in first.values() if job.run_id]
        if run_jobs and self.options.clock() - newest < _SECONDS_TO_BE_LISTED:
            ranks = min(run_jobs, key=_age).ranks
            lacking = {names.job_name(run_id, rank) for rank in ranks} - by_name.keys()
            run_jobs += [job for job in self._appeared(lacking, newest) if job.run_id]
        return listed, sorted(run_jobs, key=_age)

    def _appeared(self, job_names: set[str], newest: float) -> list[JobFacts]:
        """Return those of some jobs that exist, or that still appear.

        Jobs may appear for a while after the newest job of their run was created.
        """
        deadline = self.backoff.clock() + self.options.retry_timeout
        jobs: dict[str, JobFacts] = {}
        for delay in self.backoff.delays():
            jobs |= self.jobs.described(sorted(job_names - jobs.keys()))
            old = abs(self.options.clock() - newest) >= self.seconds_to_appear
            if old or len(jobs) == len(job_names) or self.backoff.clock() >= deadline:
                break
            self.backoff.sleep(delay)
        return list(jobs.values())

    def launched(self, run_id: str) -> None:
        """Record that a run was launched here."""
        self.launched_here.keep(run_id, self.options.clock())

    def all(self) -> list[str]:
        """Return the run_ids of all runs, the oldest run first."""
        runs: dict[str, list[Summary]] = {}
        for summary in self.client.list(names.PREFIX):
            parsed = names.parse_job_name(summary.name)
            if parsed is not None:
                runs.setdefault(parsed[0], []).append(summary)
        times: dict[str, int] = {}

        def look(summaries: Sequence[Summary]) -> None:
            for job in self.jobs.details(summaries, names.PREFIX).values():
                if job.run_id:
                    times[job.run_id] = min(job.created, times.get(job.run_id, job.created))

        # One job shows that diloco launched a run; all are looked at only if that one does not.
        look([jobs[0] for jobs in runs.values()])
        look([job for run_id, jobs in runs.items() if run_id not in times for job in jobs[1:]])
        return sorted(times, key=lambda run_id: (times[run_id], run_id))


def _age(job: JobFacts) -> tuple[int, str]:
    return job.created, job.name


def _gone(handle: ReplicaHandle) -> ReplicaNotFoundError:
    return ReplicaNotFoundError(
        f"there is no training job {handle.metadata['job_name']} of run {handle.run_id!r} any "
        "more: it was purged or deleted, and its name may be another job's by now. How it ended is "
        "known only to a journal"
    )
