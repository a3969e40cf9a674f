"""Remove what is left of a run: results, checkpoints, logs and jobs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from functools import partial
from itertools import islice

from diloco_protocol import BackendError, ReplicaHandle, ReplicaNotFoundError, UnavailableError
from diloco_protocol.backend import check_ended, shown

from .._client._errors import MissingError, TakenError
from .._client._parallel import at_once
from .._state._facts import ENDED, JobFacts
from .._state._handles import created_of, is_of
from ._logs import MOST_STREAMS
from ._results import place_of, remove_checkpoints
from ._runs import Runs

_SECONDS_TO_GO = 120.0


def purge(runs: Runs, handle: ReplicaHandle) -> None:
    """Remove what is left of a handle's run: results, checkpoints, logs and jobs.

    Does nothing if the run is gone.

    Raises:
        InvalidRequestError: A replica has not ended.
        UnavailableError: Not all of it is gone yet.
        BackendError: The handle's job is gone, and there are other jobs, of the same run or of
            a later run of its name.
    """
    try:
        own_job = runs.job(handle)
    except ReplicaNotFoundError:
        left = _left_of(runs, handle)
        if left is None:
            return
        own_job = left
    run = [
        job
        for job in runs.all_of(handle.run_id, own_job)[1]
        if job.fingerprint == own_job.fingerprint
    ]
    going = {job.name for job in run if job.status == "Deleting"}
    over = ENDED | {"Deleting"}
    check_ended(handle.run_id, [job.name for job in run if job.status not in over], "")
    # The handle's own job is removed last: while it exists, the same purge can be repeated.
    others = [job for job in run if job.name != own_job.name]
    at_once(partial(_remove, runs), [job for job in others if job.name not in going])
    if own_job.name not in going:
        _remove(runs, own_job)
    _wait_until_gone(runs, [*others, own_job])
    runs.launched_here.forget(handle.run_id)


def _left_of(runs: Runs, handle: ReplicaHandle) -> JobFacts | None:
    """Return a job of the run of a handle whose own job is gone; None if nothing is left.

    The handle's job is gone if a purge of another rank was interrupted, or if it was deleted by
    hand.
    """
    jobs = runs.all_of(handle.run_id)[1]
    own_job = next((job for job in jobs if job.name == handle.metadata["job_name"]), None)
    if own_job is not None or not jobs:
        return own_job if own_job is not None and is_of(handle, own_job) else None
    oldest, created = jobs[0], created_of(handle)
    # Of those that are going the caller removes none, and waits. And a later run of this name could
    # only begin when this one was gone.
    if all(job.status == "Deleting" for job in jobs) or oldest.created <= (created or 0):
        return oldest
    raise BackendError(
        f"the job of this handle is gone, and not {oldest.name}, of the same run or of a later "
        f"one of its name: purge what attach({handle.run_id!r}) gives"
    )


def _remove(runs: Runs, job: JobFacts) -> None:
    now = runs.jobs.described([job.name]).get(job.name)
    if now is not None and now.created != job.created:
        return  # another purge was faster, and the name lives again
    streams = list(islice(runs.client.log_streams(job.name), MOST_STREAMS))
    for stream, _ in streams:
        with contextlib.suppress(MissingError):
            runs.client.delete_log_stream(stream)
    if len(streams) == MOST_STREAMS:
        raise UnavailableError(f"the training job {job.name} has more log streams: purge again")
    _remove_objects(runs, job)
    try:
        runs.client.delete(job.name)
    except MissingError:
        pass
    except TakenError as error:
        raise UnavailableError(
            f"{error}: SageMaker deletes no job whose instance is kept warm. Purge again then"
        ) from error
    runs.jobs.forget(job)


def _remove_objects(runs: Runs, job: JobFacts) -> None:
    """Remove results and checkpoints, but only from the places in this executor's options.

    Any program that makes a job can name any place in it.
    """
    results = runs.options.output_s3_path
    if job.output == results:
        with contextlib.suppress(MissingError):
            runs.client.delete_object(*place_of(job))
    else:
        _leave(job, job.output, "output_s3_path")
    if job.checkpoints.rpartition("/")[0] in {
        f"{results}/checkpoints",
        runs.options.checkpoint_s3_path,
    }:
        remove_checkpoints(runs.client, job.name, job.checkpoints)
    elif job.checkpoints:
        _leave(job, job.checkpoints, "checkpoint_s3_path")


def _wait_until_gone(runs: Runs, jobs: Sequence[JobFacts]) -> None:
    deadline = runs.backoff.clock() + _SECONDS_TO_GO
    for delay in runs.backoff.delays():
        left = runs.jobs.described([job.name for job in jobs])
        going = [job for job in jobs if job.name in left and left[job.name].created == job.created]
        if not going:
            return
        if runs.backoff.clock() >= deadline:
            raise UnavailableError(
                f"{len(going)} training jobs are being deleted, such as {going[0].name}: purge "
                "again in a moment"
            )
        runs.backoff.sleep(delay)


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
