"""Runs that exist: find them by their handles, observe, end and remove them."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Sequence
from itertools import islice
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
    UnavailableError,
    spec_from_environment,
)
from diloco_protocol.backend import Patiently, Recent, check_ended, shown

from .._client._calls import Client
from .._client._errors import EndedError, MissingError, TakenError, UnreachedError, UnseenError
from .._client._jobs import Jobs
from .._client._parallel import at_once, outcomes
from .._request import _names as names
from .._request._options import SageMakerOptions
from .._state._facts import ENDED, JobFacts, Summary
from .._state._handles import created_of, is_of, make_handle, may_be_of, may_be_sibling
from .._state._states import UnknownWordError, attempt_in, status_of
from ._logs import MOST_STREAMS
from ._results import place_of, read_outcome, read_result, remove_checkpoints

_FEW = 2
"""The most replicas that are described one by one; for more, the jobs of their run are listed."""
_SECONDS_TO_GO = 120.0
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
        self._client = client
        self._patiently = patiently
        self._jobs = jobs
        self._backoff = backoff
        self._patience = options.retry_timeout
        self._clock = options.clock
        self._results = options.output_s3_path
        self._checkpoints = {f"{self._results}/checkpoints", options.checkpoint_s3_path}
        self._outcomes: Recent[tuple[str, int], tuple[Outcome | None]] = Recent()
        self._cancelled: Recent[tuple[str, int], bool] = Recent()
        self.seconds_to_appear = _SECONDS_TO_APPEAR
        self._launched: Recent[str, float] = Recent()

    # --- looking ---

    def job(self, handle: ReplicaHandle) -> JobFacts:
        """Return the job of a handle.

        Raises:
            ReplicaNotFoundError: It is gone.
            UnseenError: It is not found, and was created a moment ago.
            InvalidRequestError: It is of another account.
        """
        try:
            job = self._jobs.describe(handle.metadata["job_name"])
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
        try:
            job, strings = self._client.describe_with_hyperparameters(handle.metadata["job_name"])
        except MissingError as error:
            raise _gone(handle) from error
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
        if account != (client_account := self._client.account):
            raise InvalidRequestError(
                f"this handle is of the account {account}, and these credentials are of "
                f"{client_account}: use the former's"
            )

    def observe(self, handles: Sequence[ReplicaHandle]) -> dict[ReplicaHandle, ReplicaStatus]:
        """Return the statuses of replicas of one run, without those of which there is no record."""
        if len(handles) <= _FEW:
            jobs = self._jobs.described([handle.metadata["job_name"] for handle in handles])
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
        if created is not None and self._jobs.is_removed(name, created):
            return None
        # A survivor's handle has no time, but this process may have launched it.
        since = self._launched.get(handle.run_id) if created is None else created / 1000
        if since is None or abs(age := self._clock() - since) >= self.seconds_to_appear:
            return None
        verb = "launched" if created is None else "created"
        return UnseenError(
            f"SageMaker says that there is no training job {name}, which was {verb} {age:.0f} s "
            "ago: it may not be seen everywhere yet, and is believed to be gone only "
            f"{self.seconds_to_appear:.0f} s after that"
        )

    def _listed(self, handles: Sequence[ReplicaHandle]) -> dict[str, JobFacts]:
        run_id = handles[0].run_id
        times = [created_of(handle) for handle in handles]
        since = None if None in times else min(time for time in times if time is not None)
        listed = self._jobs.of_run(run_id, since)
        wanted = [
            summary
            for handle in handles
            if (summary := listed.get(handle.rank)) is not None and may_be_of(handle, summary)
        ]
        jobs = self._jobs.details(wanted, names.job_prefix(run_id))
        # A list may lack jobs that have just been created; only Describe can say that a job does
        # not exist.
        job_names = {handle.metadata["job_name"] for handle in handles}
        return {**jobs, **self._jobs.described(sorted(job_names - jobs.keys()))}

    def _status(self, job: JobFacts) -> ReplicaStatus:
        cancelled = False
        if job.status in {"Stopped", "Stopping"}:
            told = (job.name, job.created) in self._cancelled
            cancelled = told or self._jobs.is_tagged(job, names.TAG_CANCELLED)
        outcome = self._outcome(job) if job.status == "Completed" and job.restarts else None
        return status_of(job, self._client.region, outcome, cancelled=cancelled)

    def _outcome(self, job: JobFacts) -> Outcome | None:
        """Read the outcome of a job that restarts its program itself, for the attempt in it."""
        key = (job.name, job.created)
        kept = self._outcomes.get(key)
        if kept is None:
            try:
                outcome = read_outcome(self._client, job)
            except ResultLostError:
                kept = (None,)
            except BackendError:
                return None  # collecting the result will raise it; transitions show the attempt
            else:
                kept = (Outcome(0, attempt=outcome.attempt, started_at=outcome.started_at),)
            self._outcomes.keep(key, kept)
        return kept[0]

    def result(self, handle: ReplicaHandle) -> Any:
        """Return the result of a replica that has succeeded."""
        return read_result(self._client, handle, self.job(handle))

    # --- ending ---

    def cancel(self, handle: ReplicaHandle, *, seen: bool = False) -> None:
        """Ask SageMaker to end a replica; does nothing if it has ended or is gone.

        Args:
            handle: The replica.
            seen: Whether its job has just been seen, so that there is no need to look again, and
                whether the caller looks afterwards with :meth:`check_met`.

        Raises:
            BackendError: The stop, which goes by the job's name, has met another job.
        """
        asked = sent = False

        def once() -> None:
            nonlocal asked, sent, seen
            name, account = handle.metadata["job_name"], handle.metadata["account"]
            created, arn = created_of(handle), ""
            if asked or not seen or created is None:
                try:
                    job = self.job(handle)
                except ReplicaNotFoundError:
                    if sent:
                        self._check_met(handle)
                    return
                if job.status in ENDED | {"Stopping", "Deleting"}:
                    if asked and job.status in {"Stopping", "Stopped"}:  # the answer was lost
                        self._mark(name, job.created, job.arn)
                    return
                created, arn = job.created, job.arn
            sent = True
            try:
                self._client.stop(name)
            except EndedError:
                return
            except MissingError as error:
                seen = False  # another look will show whether it is gone
                raise UnavailableError(f"{error}, although it was there a moment ago") from error
            except UnavailableError as error:
                asked |= not isinstance(error, UnreachedError)
                raise
            self._mark(name, created, arn or self._client.job_arn(name, account))
            if not seen:
                self._patiently(lambda: self._check_met(handle))

        try:
            self._patiently(once)
        except (KeyboardInterrupt, SystemExit):
            # Without the tag, other processes would report that it was stopped from outside.
            with contextlib.suppress(BackendError):
                if sent and (job := self.job(handle)).status in {"Stopping", "Stopped"}:
                    self._client.tag(job.arn, names.TAG_CANCELLED, "true")
            raise

    def _check_met(self, handle: ReplicaHandle) -> None:
        with contextlib.suppress(MissingError):
            _check_same([handle], [self._jobs.describe(handle.metadata["job_name"])])

    def check_met(self, handles: Sequence[ReplicaHandle]) -> None:
        """Raise BackendError if a stop for one of a run's handles has met another job.

        As far as a list tells.
        """
        _check_same(handles, self._jobs.of_run(handles[0].run_id).values())

    def _mark(self, name: str, created: int, arn: str) -> None:
        """Record that an executor has asked for the end, which has been accepted by now."""
        self._cancelled.keep((name, created), True)
        try:
            self._patiently(lambda: self._client.tag(arn, names.TAG_CANCELLED, "true"))
        except BackendError as error:
            logging.getLogger("diloco_sagemaker").warning(
                "the training job %s is being ended, and could not be tagged as cancelled: others "
                "will take it to be stopped from outside (%s)",
                name,
                error,
            )

    def purge(self, handle: ReplicaHandle) -> None:
        """Remove what is left of a handle's run: results, checkpoints, logs and jobs.

        Does nothing if the run is gone.

        Raises:
            InvalidRequestError: A replica has not ended.
            UnavailableError: Not all of it is gone yet.
            BackendError: The handle's job is gone, and there are other jobs, of the same run or of
                a later run of its name.
        """
        try:
            own_job = self.job(handle)
        except ReplicaNotFoundError:
            left = self._left_of(handle)
            if left is None:
                return
            own_job = left
        run = [
            job
            for job in self._all(handle.run_id, own_job)[1]
            if job.fingerprint == own_job.fingerprint
        ]
        going = {job.name for job in run if job.status == "Deleting"}
        over = ENDED | {"Deleting"}
        check_ended(handle.run_id, [job.name for job in run if job.status not in over], "")
        # The handle's own job is removed last: while it exists, the same purge can be repeated.
        others = [job for job in run if job.name != own_job.name]
        at_once(self._remove, [job for job in others if job.name not in going])
        if own_job.name not in going:
            self._remove(own_job)
        self._wait_until_gone([*others, own_job])
        self._launched.forget(handle.run_id)

    def _left_of(self, handle: ReplicaHandle) -> JobFacts | None:
        """Return a job of the run of a handle whose own job is gone; None if nothing is left.

        The handle's job is gone if a purge of another rank was interrupted, or if it was deleted by
        hand.
        """
        jobs = self._all(handle.run_id)[1]
        if not jobs:
            return None
        by_name = {job.name: job for job in jobs}
        if (own_job := by_name.get(handle.metadata["job_name"])) is not None:
            return own_job if is_of(handle, own_job) else None
        if all(job.status == "Deleting" for job in jobs):
            return jobs[0]  # of any launch: the caller removes none, and waits for them
        oldest, created = jobs[0], created_of(handle)
        if created is None:
            own_job = next((job for job in jobs if is_of(handle, job)), None)
            if own_job is not None or not any(may_be_sibling(handle, job) for job in jobs):
                return own_job
        elif oldest.created <= created:
            return oldest  # a later run of this name could only begin when this one was gone
        elif names.job_name(handle.run_id, oldest.ranks[0]) in by_name:
            # A launch creates its first job first: this is a later launch, maybe still under way
            return None
        raise BackendError(
            f"the job of this handle is gone, and not {oldest.name}, of the same run or of a later "
            f"one of its name: purge what attach({handle.run_id!r}) gives"
        )

    def _remove(self, job: JobFacts) -> None:
        now = self._jobs.described([job.name]).get(job.name)
        if now is not None and now.created != job.created:
            return  # another purge was faster, and the name lives again
        streams = list(islice(self._client.log_streams(job.name), MOST_STREAMS))
        for stream, _ in streams:
            with contextlib.suppress(MissingError):
                self._client.delete_log_stream(stream)
        if len(streams) == MOST_STREAMS:
            raise UnavailableError(f"the training job {job.name} has more log streams: purge again")
        self._remove_objects(job)
        try:
            self._client.delete(job.name)
        except MissingError:
            pass
        except TakenError as error:
            pool = f"; its warm pool is {job.warm_pool}" if job.warm_pool else ""
            raise UnavailableError(
                f"{error}{pool}: SageMaker deletes a job only when its warm pool is gone. Purge "
                "again then"
            ) from error
        self._jobs.forget(job)

    def _remove_objects(self, job: JobFacts) -> None:
        """Remove results and checkpoints, but only from the places in this executor's options.

        Any program that makes a job can name any place in it.
        """
        if job.output == self._results:
            with contextlib.suppress(MissingError):
                self._client.delete_object(*place_of(job))
        else:
            _leave(job, job.output, "output_s3_path")
        if job.checkpoints.rpartition("/")[0] in self._checkpoints:
            remove_checkpoints(self._client, job.name, job.checkpoints)
        elif job.checkpoints:
            _leave(job, job.checkpoints, "checkpoint_s3_path")

    def _wait_until_gone(self, jobs: Sequence[JobFacts]) -> None:
        deadline = self._backoff.clock() + _SECONDS_TO_GO
        for delay in self._backoff.delays():
            left = self._jobs.described([job.name for job in jobs])
            going = [
                job for job in jobs if job.name in left and left[job.name].created == job.created
            ]
            if not going:
                return
            if self._backoff.clock() >= deadline:
                raise UnavailableError(
                    f"{len(going)} training jobs are being deleted, such as {going[0].name}: purge "
                    "again in a moment"
                )
            self._backoff.sleep(delay)

    # --- finding ---

    def find(self, run_id: str) -> list[ReplicaHandle]:
        """Return the handles of a run, in rank order.

        Raises:
            ReplicaNotFoundError: There is no such run.
            UnseenError: The run is not found, and was launched here a moment ago.
        """
        listed, run_jobs = self._all(run_id)
        if not run_jobs:
            if abs(self._clock() - (self._launched.get(run_id) or 0.0)) < self.seconds_to_appear:
                raise UnseenError(
                    f"SageMaker shows no training job of the run {run_id!r}, which was launched "
                    "here a moment ago"
                )
            raise ReplicaNotFoundError(
                f"there is no run {run_id!r} in {self._client.region} that diloco has launched: "
                "list_runs() names those that there are"
            )
        # A run is one launch: jobs with another fingerprint came later, and belong to another run.
        first = run_jobs[0]
        region, account = self._client.region, first.account or self._client.account
        created = {
            job.rank: listed.get(job.rank, job).created
            for job in run_jobs
            if job.fingerprint == first.fingerprint
        }
        return [
            make_handle(run_id, rank, first.world_size, when, region, account)
            for rank, when in sorted(created.items())
        ]

    def _all(self, run_id: str, *more: JobFacts) -> tuple[dict[int, Summary], list[JobFacts]]:
        """Return a run's entries in the list, and its jobs, the oldest first.

        The jobs include those that the list lacks, as it may for a while.
        """
        listed = self._jobs.of_run(run_id)
        by_name = self._jobs.details(list(listed.values()), names.job_prefix(run_id))
        by_name |= {job.name: job for job in more}
        run_jobs = [job for job in by_name.values() if job.run_id]
        newest = max((job.created / 1000 for job in run_jobs), default=math.inf)
        if not run_jobs:  # a launch creates its first job first
            first = self._jobs.described([names.job_name(run_id, 0)])
            by_name |= first
            run_jobs = [job for job in first.values() if job.run_id]
        if run_jobs and self._clock() - newest < _SECONDS_TO_BE_LISTED:
            ranks = min(run_jobs, key=_age).ranks
            lacking = {names.job_name(run_id, rank) for rank in ranks} - by_name.keys()
            run_jobs += [job for job in self._appeared(lacking, newest) if job.run_id]
        return listed, sorted(run_jobs, key=_age)

    def _appeared(self, job_names: set[str], newest: float) -> list[JobFacts]:
        """Return those of some jobs that exist, or that still appear.

        Jobs may appear for a while after the newest job of their run was created.
        """
        deadline = self._backoff.clock() + self._patience
        jobs: dict[str, JobFacts] = {}
        for delay in self._backoff.delays():
            jobs |= self._jobs.described(sorted(job_names - jobs.keys()))
            old = abs(self._clock() - newest) >= self.seconds_to_appear
            if old or len(jobs) == len(job_names) or self._backoff.clock() >= deadline:
                break
            self._backoff.sleep(delay)
        return list(jobs.values())

    def launched(self, run_id: str) -> None:
        """Record that a run was launched here."""
        self._launched.keep(run_id, self._clock())

    def all(self) -> list[str]:
        """Return the run_ids of all runs, the oldest run first."""
        runs: dict[str, list[Summary]] = {}
        for summary in self._client.list(names.PREFIX):
            parsed = names.parse_job_name(summary.name)
            if parsed is not None:
                runs.setdefault(parsed[0], []).append(summary)
        times: dict[str, int] = {}

        def look(summaries: Sequence[Summary]) -> None:
            for job in self._jobs.details(summaries, names.PREFIX).values():
                if job.run_id:
                    times[job.run_id] = min(job.created, times.get(job.run_id, job.created))

        # One job shows that diloco launched a run; all are looked at only if that one does not.
        look([jobs[0] for jobs in runs.values()])
        look([job for run_id, jobs in runs.items() if run_id not in times for job in jobs[1:]])
        return sorted(times, key=lambda run_id: (times[run_id], run_id))


def _check_same(handles: Sequence[ReplicaHandle], jobs: Iterable[Summary]) -> None:
    """Refuse to be silent where the stop that was sent for a handle has met another job."""
    by_name = {job.name: job for job in jobs if job.status in {"Stopping", "Stopped"}}
    for handle in handles:
        if (job := by_name.get(handle.metadata["job_name"])) is None:
            continue
        if not (is_of(handle, job) if isinstance(job, JobFacts) else may_be_of(handle, job)):
            raise BackendError(
                f"the training job {job.name} of run {handle.run_id!r} was removed a moment ago: "
                "its name is another's by now, and that one has been stopped"
            )


def _age(job: JobFacts) -> tuple[int, str]:
    return job.created, job.name


def _leave(job: JobFacts, place: str, option: str) -> None:
    logging.getLogger("diloco_sagemaker").warning(
        (
            "what the training job %s has in %s is left there: %s= of this executor names another "
            "place"
        ),
        job.name,
        shown(place),
        option,
    )


def _gone(handle: ReplicaHandle) -> ReplicaNotFoundError:
    return ReplicaNotFoundError(
        f"there is no training job {handle.metadata['job_name']} of run {handle.run_id!r} any "
        "more: it was purged or deleted, and its name may be another job's by now. How it ended is "
        "known only to a journal"
    )
