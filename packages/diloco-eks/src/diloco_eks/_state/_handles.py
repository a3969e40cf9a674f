"""Conversion between handles and Jobs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from diloco_protocol import BackendError, InvalidRequestError, ReplicaHandle
from diloco_protocol.backend import check_metadata, read_whole, redact_text, shown

from .._request._names import check_dns_label
from ._facts import JobFacts


def handles_of(facts: JobFacts, namespace: str, server: str) -> list[ReplicaHandle]:
    """Return the handles of the replicas of a Job, in rank order.

    If it is not known whether the Job was created, its manifest has no uid, and the launch's
    fingerprint identifies it.
    """
    metadata = {
        "first_rank": str(facts.first_rank),
        "job_name": facts.run_id,
        "job_uid": facts.uid,
        "namespace": namespace,
        "server": server,
    }
    if not facts.uid:
        metadata["fingerprint"] = facts.fingerprint
    return [
        ReplicaHandle(rank, "eks", metadata, run_id=facts.run_id, world_size=facts.world_size)
        for rank in facts.ranks
    ]


def check_handle(handle: ReplicaHandle, namespaces: Collection[str]) -> None:
    """Refuse a handle that no launch made, or that leads out of the executor's namespaces.

    Raises:
        InvalidRequestError: The handle lacks metadata that leads to its Job, or names another Job
            than its run's, or another namespace.
    """
    place = handle.metadata
    needed = {"first_rank", "job_name", "job_uid", "namespace", "server"}
    check_metadata(handle, "a Job", needed if place.get("job_uid") else needed | {"fingerprint"})
    read_whole(
        "this handle does not lead to a Job: its first_rank", place["first_rank"], 0, handle.rank
    )
    if place["job_name"] != handle.run_id:
        raise InvalidRequestError(
            f"this handle does not lead to a Job of its run: the Job of run {handle.run_id!r} has "
            f"that name, and the handle names {shown(place['job_name'])}"
        )
    check_dns_label("a handle's run_id", handle.run_id)
    if place["namespace"] not in namespaces:
        raise InvalidRequestError(
            f"this handle leads to the namespace {shown(place['namespace'])}, and this executor "
            f"works in {', '.join(map(repr, namespaces))}: allow it with other_namespaces=, or use "
            "an executor of that namespace"
        )


def same_run(handle: ReplicaHandle, facts: JobFacts) -> bool:
    """Return whether a Job is the handle's, and not an earlier or later one of the same name.

    Raises:
        BackendError: The Job is the handle's, but no longer says that diloco launched it, because
            another program has changed it.
    """
    place = handle.metadata
    unchanged = facts.run_id == handle.run_id
    if place["job_uid"]:
        same = facts.uid == place["job_uid"]
    elif facts.fingerprint:
        same = facts.fingerprint == place["fingerprint"]
    else:  # a run's Job always has a fingerprint, so without one it cannot be identified
        same, unchanged = True, False
    if same and not unchanged:
        raise changed(place["namespace"], place["job_name"])
    return same


def changed(namespace: str, run_id: str) -> BackendError:
    """Return the error for a Job that no longer says that diloco launched it."""
    return BackendError(
        f"the Job {namespace}/{run_id} is there, but what says that it is the run {run_id!r} of "
        "diloco was changed (its labels, annotations, completions or completionMode): put that "
        "back, or delete the Job with kubectl. Its pods may be running"
    )


def orphaned(job: str, left: Sequence[str], namespace: str, selector: str) -> BackendError:
    """Return the error for a Job that was deleted without its pods, which have these labels."""
    return BackendError(
        f"the Job {job} was deleted without its pods, and {len(left)} of them are still there, "
        f"such as {shown(left[0])}: end them with kubectl delete pods --namespace {namespace} -l "
        f"{redact_text(selector)}"
    )


def index_of(handle: ReplicaHandle, facts: JobFacts) -> int:
    """Return a replica's index in the Job.

    Raises:
        InvalidRequestError: The Job has no such rank.
    """
    if handle.rank not in facts.ranks:
        last = facts.first_rank + facts.completions - 1
        raise InvalidRequestError(
            f"the Job {facts.name} has the ranks {facts.first_rank} to {last}, and not "
            f"{handle.rank}: the handle is not of this launch, or the Job's completions were "
            "changed"
        )
    return handle.rank - facts.first_rank
