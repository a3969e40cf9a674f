"""Cancelling a run in a way that keeps the evidence, and removing it in a separate step."""

from __future__ import annotations

from typing import Any

from diloco_protocol import ForbiddenError, ReplicaHandle, UnavailableError

from .._client._cluster import Cluster
from .._client._errors import ConflictError, MissingError
from .._request._names import CANCELLED
from .._state._facts import JobFacts
from .._state._handles import same_run
from .._state._reading import mapping, read_job

_TRIES = 10


def cancel_patch(facts: JobFacts, job: dict[str, Any], now: str) -> dict[str, Any]:
    """Return the patch that turns a running or queued Job into a cancelled one.

    A deadline of one second ends a running Job: its pods get their grace, those that have succeeded
    stay so, and the Job finishes, so that its TTL removes it. The mark distinguishes a cancel from
    a timeout. The deadline of a suspended Job does not run, so a suspended Job is resumed with room
    for no pod. Under Kueue only the mark is set here, because Kueue would undo the rest.

    The resourceVersion makes the patch atomic: if the Job has changed since it was read, nothing
    happens.
    """
    suspended = mapping(job.get("spec")).get("suspend") is True
    spec: dict[str, Any] = {"activeDeadlineSeconds": 1}
    if suspended and facts.queue is not None:
        spec = {}
    elif suspended:
        spec |= {"suspend": False, "parallelism": 0}
    metadata = {"resourceVersion": facts.version, "annotations": {CANCELLED: now}}
    return {"metadata": metadata} | ({"spec": spec} if spec else {})


def cancel_job(cluster: Cluster, handle: ReplicaHandle, now: str) -> bool:
    """Cancel a handle's run, and return whether its Job exists.

    Repeatable; a run that has ended, or whose end is certain, stays as it is.

    A run that was cancelled while it was suspended, and that a user then resumed, is ended like any
    other.

    Raises:
        BackendError: The cluster refused, or could not be queried; nothing has changed.
    """
    space, name = handle.metadata["namespace"], handle.metadata["job_name"]
    for _ in range(_TRIES):
        try:
            job = cluster.read_job(space, name)
            facts = read_job(job)
            if not same_run(handle, facts):
                return False
            spec = mapping(job.get("spec"))
            is_suspended = spec.get("suspend") is True
            ending = facts.cancelled and (is_suspended or spec.get("activeDeadlineSeconds") == 1)
            if facts.decided or facts.deleting or ending:
                return True
            queued = facts.queue is not None and is_suspended
            # The mark is set last: a suspended run that has it is reported as cancelled.
            if not queued or _leave_queue(cluster, space, facts):
                cluster.patch_job(space, name, cancel_patch(facts, job, now))
        except MissingError:
            return False
        except ConflictError:
            continue  # the Job has changed meanwhile: read it again
        return True
    raise UnavailableError(
        f"cannot cancel Job {space}/{name}: in {_TRIES} tries another client changed it each time "
        "before the cancel arrived; it was not cancelled"
    )


def _leave_queue(cluster: Cluster, space: str, facts: JobFacts) -> bool:
    """Take a run out of Kueue's queue, and return whether its Job is still there.

    Where the Workload is out of reach, the Job itself is deleted if it is unchanged: it has no
    pods.
    """
    try:
        workloads = cluster.list_workloads(space, facts.uid)
        for workload in workloads:
            cluster.stop_workload(space, workload)
    except (ForbiddenError, MissingError):
        workloads = []
    if not workloads:
        cluster.delete_job(space, facts.name, facts.uid, facts.version)
    return bool(workloads)


def purge_job(cluster: Cluster, space: str, facts: JobFacts) -> None:
    """Delete a run's Job and pods.

    Do nothing if the Job is gone, or another one has its name by now.
    """
    try:
        cluster.delete_job(space, facts.name, facts.uid)
    except MissingError:
        return
    except ConflictError:
        try:
            current = read_job(cluster.read_job(space, facts.name))
        except MissingError:
            return
        if current.uid == facts.uid and not current.deleting:
            raise
