"""Ending a run in one step that keeps the evidence, and removing it in another."""

from __future__ import annotations

from typing import Any

from diloco_protocol import ForbiddenError, ReplicaHandle, UnavailableError

from ._cluster import Cluster
from ._errors import ConflictError, MissingError
from ._facts import JobFacts
from ._handles import same_run
from ._names import CANCELLED
from ._reading import mapping, read_job

_TRIES = 10


def cancel_patch(facts: JobFacts, job: dict[str, Any], now: str) -> dict[str, Any]:
    """The patch that turns a running or queued Job into a cancelled one.

    A deadline of a second ends a running Job: its pods get their grace, what has succeeded stays
    so, and the Job finishes, so that its TTL collects it. The mark tells a cancel from a timeout.
    No deadline runs while a Job is suspended, so that one is resumed with room for no pod. Under
    Kueue only the mark is set here: it would undo the rest.

    The version makes it one step: if the Job has changed since it was read, nothing happens.
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
    """Have a handle's run ended; returns whether there is its Job.

    Repeatable; what has ended or is decided stays as it is.

    One that was cancelled while it was held, and that somebody let go on, is ended as any other.

    Raises:
        BackendError: The cluster refused, or could not be asked; nothing has changed.
    """
    space, name = handle.metadata["namespace"], handle.metadata["job_name"]
    for _ in range(_TRIES):
        try:
            job = cluster.read_job(space, name)
            facts = read_job(job)
            if not same_run(handle, facts):
                return False
            spec = mapping(job.get("spec"))
            held = spec.get("suspend") is True
            ending = facts.cancelled and (held or spec.get("activeDeadlineSeconds") == 1)
            if facts.decided or facts.deleting or ending:
                return True
            queued = facts.queue is not None and held
            # The mark comes last: with it, a run that is held is called cancelled.
            if not queued or _leave_queue(cluster, space, facts):
                cluster.patch_job(space, name, cancel_patch(facts, job, now))
        except MissingError:
            return False
        except ConflictError:
            continue  # it has changed meanwhile: look again
        return True
    raise UnavailableError(
        f"cannot cancel Job {space}/{name}: in {_TRIES} tries somebody else changed it each time "
        "before the cancel arrived; it was not cancelled"
    )


def _leave_queue(cluster: Cluster, space: str, facts: JobFacts) -> bool:
    """Take a run out of Kueue's queue; returns whether its Job is still there.

    Where the Workload is out of reach the Job itself is deleted, as it was read: it has no pods.
    """
    try:
        workloads = cluster.list_workloads(space, facts.uid)
        for workload in workloads:
            cluster.stop_workload(space, str(workload["metadata"].get("name")))
    except (ForbiddenError, MissingError):
        workloads = []
    if not workloads:
        cluster.delete_job(space, facts.name, facts.uid, facts.version)
    return bool(workloads)


def purge_job(cluster: Cluster, space: str, facts: JobFacts) -> None:
    """Delete a run's Job and pods; does nothing if the Job is gone, or another one has its name by now."""
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
