"""The report of a replica that has succeeded: a file that SageMaker uploads unchanged."""

from __future__ import annotations

import contextlib

from diloco_protocol import (
    DilocoError,
    InvalidRequestError,
    Outcome,
    ResultLostError,
)
from diloco_protocol.backend import OUTCOME_BYTES

from .._client._calls import Client
from .._client._errors import MissingError
from .._client._parallel import at_once
from .._request import _names as names
from .._state._facts import JobFacts

_SLACK = 60.0  # seconds by which the clocks of S3 and of SageMaker may differ


def place_of(job: JobFacts) -> tuple[str, str]:
    """Return bucket and key of a job's outcome."""
    bucket, _, prefix = job.output.removeprefix("s3://").partition("/")
    return bucket, f"{prefix.strip('/')}/{job.name}/output/model/{names.OUTCOME_NAME}".strip("/")


def remove_checkpoints(client: Client, job_name: str, uri: str) -> None:
    """Remove the checkpoints of a job, or a later job of this name would continue from them.

    A folder that is not named after the job is left alone, whichever program has made the job: it
    may hold something else.

    Args:
        client: Lists and deletes the objects.
        job_name: The job's name.
        uri: CheckpointConfig.S3Uri; empty if the job keeps no checkpoints.
    """
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    folder = prefix.strip("/")
    if folder.rpartition("/")[2] != job_name:
        return

    def remove(key: str) -> None:
        with contextlib.suppress(MissingError):
            client.delete_object(bucket, key)

    with contextlib.suppress(MissingError):  # no such bucket any more
        for keys in client.object_keys(bucket, f"{folder}/"):
            at_once(remove, keys)


def read_outcome(client: Client, job: JobFacts) -> Outcome:
    """Read the outcome of a job that has completed.

    Raises:
        ResultLostError: It is gone for good, damaged, too large, or older than the job.
        BackendError: It could not be read this time, or reading it is not allowed.
    """
    bucket, key = place_of(job)
    try:
        content, written = client.read_object(bucket, key, OUTCOME_BYTES)
    except MissingError as error:
        raise ResultLostError(
            f"{error}: it was removed, or command= is not what starts diloco_protocol.runner"
        ) from error
    except InvalidRequestError as error:
        raise ResultLostError(str(error)) from error
    # The time comes from S3 itself; the content of an object could claim any time.
    if written < job.created / 1000 - _SLACK:
        raise ResultLostError(f"s3://{bucket}/{key} is older than the job, and of another one")
    try:
        outcome = Outcome.from_json(content.decode())
    except (UnicodeDecodeError, DilocoError) as error:
        raise ResultLostError(f"s3://{bucket}/{key} is damaged: {error}") from error
    if outcome.exit_code != 0:
        raise ResultLostError(f"s3://{bucket}/{key} tells of exit code {outcome.exit_code}")
    return outcome
