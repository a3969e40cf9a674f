"""End a replica, and say so where its job's name has become another's meanwhile."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence

from diloco_protocol import BackendError, ReplicaHandle, ReplicaNotFoundError, UnavailableError

from .._client._errors import EndedError, MissingError, UnreachedError
from .._request import _names as names
from .._state._facts import ENDED, JobFacts, Summary
from .._state._handles import created_of, is_of, may_be_of
from ._runs import Runs


def cancel(runs: Runs, handle: ReplicaHandle, *, seen: bool = False) -> None:
    """Ask SageMaker to end a replica; does nothing if it has ended or is gone.

    Args:
        runs: The runs of its account and region.
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
                job = runs.job(handle)
            except ReplicaNotFoundError:
                if sent:
                    _check_met(runs, handle)
                return
            if job.status in ENDED | {"Stopping", "Deleting"}:
                if asked and job.status in {"Stopping", "Stopped"}:  # the answer was lost
                    _mark(runs, name, job.created, job.arn)
                return
            created, arn = job.created, job.arn
        sent = True
        try:
            runs.client.stop(name)
        except EndedError:
            return
        except MissingError as error:
            seen = False  # another look will show whether it is gone
            raise UnavailableError(f"{error}, although it was there a moment ago") from error
        except UnavailableError as error:
            asked |= not isinstance(error, UnreachedError)
            raise
        _mark(runs, name, created, arn or runs.client.job_arn(name, account))
        if not seen:
            runs.patiently(lambda: _check_met(runs, handle))

    runs.patiently(once)


def check_met(runs: Runs, handles: Sequence[ReplicaHandle]) -> None:
    """Raise BackendError if a stop for one of a run's handles has met another job.

    As far as a list tells.
    """
    _check_same(handles, runs.jobs.of_run(handles[0].run_id).values())


def _check_met(runs: Runs, handle: ReplicaHandle) -> None:
    with contextlib.suppress(MissingError):
        _check_same([handle], [runs.jobs.describe(handle.metadata["job_name"])])


def _mark(runs: Runs, name: str, created: int, arn: str) -> None:
    """Record that an executor has asked for the end, which has been accepted by now."""
    runs.cancelled.keep((name, created), True)
    try:
        runs.patiently(lambda: runs.client.tag(arn, names.TAG_CANCELLED, "true"))
    except BackendError as error:
        logging.getLogger("diloco_sagemaker").warning(
            "the training job %s is being ended, and could not be tagged as cancelled: others "
            "will take it to be stopped from outside (%s)",
            name,
            error,
        )


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
