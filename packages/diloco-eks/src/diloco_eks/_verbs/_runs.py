"""Runs that exist: finding them by handles, looking at them, ending and removing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from diloco_protocol import (
    BackendError,
    InvalidRequestError,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaState,
    ReplicaStatus,
    ResultLostError,
    UnavailableError,
    spec_from_environment,
)
from diloco_protocol.backend import check_ended, read_whole, shown

from .._client._cluster import Cluster
from .._client._errors import MissingError, NoLogError
from .._request._names import CONTAINER, CONTROLLER_UID, RUN, is_label_value
from .._state._events import is_stuck
from .._state._facts import JobFacts, PodFacts, pods_by_index
from .._state._handles import changed, handles_of, index_of, orphaned, same_run
from .._state._memory import Memory
from .._state._reading import mappings, read_job
from .._state._states import map_states
from ._cancel import cancel_job, purge_job
from ._results import read_result
from ._warnings import Warnings


class Runs:
    """The runs of a cluster, by their handles. Thread-safe."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._warnings = Warnings(cluster, clock)
        self._memory = Memory()

    def job(self, handle: ReplicaHandle) -> JobFacts:
        """Return the Job of a handle.

        Raises:
            ReplicaNotFoundError: The Job is gone.
            InvalidRequestError: The Job is not on this cluster, and the handle belongs to another
                one.
            BackendError: The Job was deleted, and its pods were not; or another program has changed
                it.
        """
        return read_job(self._raw_job(handle))

    def _raw_job(self, handle: ReplicaHandle) -> Mapping[str, Any]:
        place = handle.metadata
        try:
            job = self._cluster.read_job(place["namespace"], place["job_name"])
        except MissingError as error:
            raise self._not_here(handle) from error
        if not same_run(handle, read_job(job)):
            raise self._not_here(handle)
        return job

    def rendezvous(self, handle: ReplicaHandle) -> str | None:
        """Return where a replica meets the others, by its Job; raises as :meth:`job`."""
        job = self._raw_job(handle)
        index_of(handle, read_job(job))  # refuses a rank that the Job does not have
        containers = mappings(job["spec"]["template"]["spec"].get("containers"))
        container = next((item for item in containers if item.get("name") == CONTAINER), {})
        pieces = {entry["name"]: entry.get("value", "") for entry in mappings(container.get("env"))}
        return spec_from_environment(pieces).rendezvous_uri

    def observe(self, handles: Sequence[ReplicaHandle]) -> dict[ReplicaHandle, ReplicaStatus]:
        """Return the statuses of replicas of one run.

        If the Job is gone, or another program has changed it, only the ends that were seen are
        returned; if there is none, the error is raised.
        """
        try:
            return self._look(handles)
        except BackendError as error:
            ends = self._memory.ends(handles)
            gone = isinstance(error, ReplicaNotFoundError)
            if ends and (gone or (len(ends) == len(handles) and not error.retryable)):
                return ends
            raise

    def result(
        self, handle: ReplicaHandle, pods: Callable[[], list[PodFacts]], now: float, patience: float
    ) -> Any:
        """Return the result of a replica that has succeeded; see :func:`read_result`.

        A result also counts as lost if the replica's node has not had the log for more than
        ``patience`` seconds.
        """
        try:
            result = read_result(self._cluster, handle, self._memory.succeeded(handle), pods)
        except NoLogError as error:
            if now - self._memory.without_log(handle, now) <= patience:
                raise
            raise ResultLostError(str(error)) from error
        self._memory.has_log(handle)
        return result

    def cancel(self, handle: ReplicaHandle, now: str) -> None:
        """Cancel the run of a handle; do nothing if it is gone.

        Raises:
            BackendError: The cluster refused, could not be queried, or is another one than the
                handle's.
        """
        exists = cancel_job(self._cluster, handle, now)
        if not exists and not isinstance(error := self._not_here(handle), ReplicaNotFoundError):
            raise error

    def purge(self, handle: ReplicaHandle) -> None:
        """Remove the Job and the pods of a handle's run; do nothing if it is gone.

        Raises:
            InvalidRequestError: A replica has not ended.
            UnavailableError: The cluster has not finished removing it.
        """
        try:
            facts = self.job(handle)
        except ReplicaNotFoundError:
            return
        space, server = handle.metadata["namespace"], handle.metadata["server"]
        run = handles_of(facts, space, server)
        try:
            seen = self._look(run)
        except ReplicaNotFoundError:  # it was removed meanwhile, such as by another purge
            return
        alive = [replica.rank for replica, status in seen.items() if not status.state.terminal]
        check_ended(handle.run_id, [] if facts.deleting else alive)
        purge_job(self._cluster, space, facts)
        self._memory.forget(run)
        try:
            left = read_job(self._cluster.read_job(space, facts.name))
        except MissingError:
            return
        if left.uid == facts.uid:
            # The Job goes when its pods are gone; until then its name is taken, and its logs can be
            # read.
            raise UnavailableError(
                f"the Job {space}/{facts.name} is being removed, and not all of it is gone yet: "
                "purge again in a moment"
            )

    def _look(self, handles: Sequence[ReplicaHandle]) -> dict[ReplicaHandle, ReplicaStatus]:
        """Read the Job, then list its pods, so that the pods are never older than the Job."""
        facts = self.job(handles[0])
        space = handles[0].metadata["namespace"]
        pods, listed = self._cluster.list_pods(space, facts.uid)
        version = _order(listed)
        by_index = {index_of(handle, facts): handle for handle in handles}
        known = dict(by_index)
        if (culprit := facts.culprit) is not None:
            # Messages of other ranks quote what was seen of it, whichever ranks are asked for.
            known[culprit] = replace(handles[0], rank=facts.first_rank + culprit)
        mapped = map_states(facts, pods, by_index, self._memory.seen(known))
        succeeded = {pod.index: pod for pod in pods if pod.phase == "Succeeded"}
        statuses = {}
        newest = {index: group[-1] for index, group in pods_by_index(pods).items()}
        now = self._clock()
        for index, (status, seen) in mapped.items():
            last = newest.get(index)
            # A look at 50 ranks must not make 50 calls: the events of pods are read only if one
            # rank is asked for.
            if is_stuck(status, last, facts, now) and (last is None or len(handles) == 1):
                about = facts.uid if last is None else last.uid
                status = self._warnings.explain(status, space, about)
            pod = succeeded.get(index) if status.state is ReplicaState.SUCCEEDED else None
            statuses[index] = self._memory.keep(by_index[index], status, seen, pod, version)
        return {handle: statuses[index_of(handle, facts)] for handle in handles}

    def _not_here(self, handle: ReplicaHandle) -> BackendError:
        place, server = handle.metadata, self._cluster.client.server
        job = f"Job {place['namespace']}/{place['job_name']}"
        if place["server"] != server:
            return InvalidRequestError(
                f"the {job} is not on {server}: this handle belongs to the cluster at "
                f"{shown(place['server'])}; give its context= or kubeconfig= to the executor"
            )
        uid = place["job_uid"]
        selector = f"{CONTROLLER_UID}={uid}" if uid else f"{RUN}={handle.run_id}"
        if (not uid or is_label_value(uid)) and (
            left := self._cluster.list_orphans(place["namespace"], selector)
        ):
            return orphaned(job.removeprefix("Job "), left, place["namespace"], selector)
        return ReplicaNotFoundError(
            f"there is no {job} of run {handle.run_id!r} any more: it was purged, deleted, or its "
            "TTL is over. How it ended is known only to a journal"
        )


def find_job(cluster: Cluster, namespace: str, run_id: str) -> JobFacts:
    """Return the Job of a run.

    Raises:
        ReplicaNotFoundError: There is no such Job.
        BackendError: Another program has changed the Job, so that it no longer says that diloco
            launched it.
    """
    try:
        facts = read_job(cluster.read_job(namespace, run_id))
    except MissingError as error:
        if left := cluster.list_orphans(namespace, f"{RUN}={run_id}"):
            raise orphaned(f"{namespace}/{run_id}", left, namespace, f"{RUN}={run_id}") from error
        raise ReplicaNotFoundError(
            f"there is no run {run_id!r} in the namespace {namespace!r}: {error}"
        ) from error
    if facts.run_id != run_id and facts.fingerprint:
        raise changed(namespace, run_id)
    if facts.run_id != run_id:
        raise ReplicaNotFoundError(f"the Job {namespace}/{run_id} was not launched by diloco")
    return facts


def _order(version: str) -> int:
    """Return a resourceVersion as a number, which is larger for newer lists; 0 if it is not one.

    https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions
    """
    try:
        return read_whole("a resourceVersion", version, 0, 2**64)
    except InvalidRequestError:
        return 0
