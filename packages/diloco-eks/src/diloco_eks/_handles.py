"""From handles to Jobs and back."""

from __future__ import annotations

from diloco_protocol import InvalidRequestError, ReplicaHandle, ReplicaNotFoundError

from ._cluster import Cluster
from ._errors import MissingError
from ._facts import JobFacts, read_job


def make_handles(
    run_id: str, uid: str, first_rank: int, count: int, world_size: int, namespace: str, server: str
) -> list[ReplicaHandle]:
    """The handles of a run's replicas, in rank order. A uid that is not known yet is empty."""
    metadata = {
        "first_rank": str(first_rank),
        "job_name": run_id,
        "job_uid": uid,
        "namespace": namespace,
        "server": server,
    }
    return [
        ReplicaHandle(rank, "eks", metadata, run_id=run_id, world_size=world_size)
        for rank in range(first_rank, first_rank + count)
    ]


def check_handle(handle: ReplicaHandle) -> None:
    """Refuse a handle that was not made by a launch.

    Raises:
        InvalidRequestError: It lacks what leads to its Job.
    """
    missing = {"first_rank", "job_name", "job_uid", "namespace", "server"} - handle.metadata.keys()
    if missing or not handle.metadata["first_rank"].isdecimal():
        raise InvalidRequestError(
            f"this handle does not lead to a Job: its metadata lacks {', '.join(sorted(missing)) or 'a number as first_rank'}"
        )


def same_run(handle: ReplicaHandle, facts: JobFacts) -> bool:
    """Whether a Job is the handle's, and not a later one of the same name."""
    uid = handle.metadata["job_uid"]
    return facts.uid == uid if uid else facts.run_id == handle.run_id


def index_of(handle: ReplicaHandle, facts: JobFacts) -> int:
    """A replica's index in the Job.

    Raises:
        InvalidRequestError: The Job has no such rank.
    """
    index = handle.rank - facts.first_rank
    if not 0 <= index < facts.completions:
        last = facts.first_rank + facts.completions - 1
        raise InvalidRequestError(
            f"the Job {facts.name} has the ranks {facts.first_rank} to {last}, and not {handle.rank}"
        )
    return index


def find_job(cluster: Cluster, namespace: str, run_id: str) -> JobFacts:
    """The Job of a run.

    Raises:
        ReplicaNotFoundError: There is no such Job.
    """
    try:
        facts = read_job(cluster.read_job(namespace, run_id))
    except MissingError as error:
        raise ReplicaNotFoundError(
            f"there is no run {run_id!r} in the namespace {namespace!r}: {error}"
        ) from error
    if facts.run_id != run_id:
        raise ReplicaNotFoundError(f"the Job {namespace}/{run_id} was not launched by diloco")
    return facts
