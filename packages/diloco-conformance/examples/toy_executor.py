"""The backend for the toy cloud: one job per replica."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from toy_cloud import CloudError, Job, ToyCloud

from diloco_protocol import (
    BackendError,
    BaseExecutor,
    Capabilities,
    ForbiddenError,
    InvalidRequestError,
    LaunchError,
    LogQuery,
    Reason,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaState,
    ReplicaStatus,
    RunConflictError,
    RunRequest,
    ThrottledError,
    UnavailableError,
    environment,
)

T = TypeVar("T")

ERRORS: dict[str, type[BackendError]] = {
    "Throttled": ThrottledError,
    "ServerError": UnavailableError,
    "Refused": UnavailableError,
    "ConnectionCut": UnavailableError,
    "Forbidden": ForbiddenError,
}

STATES = {
    "QUEUED": (ReplicaState.PENDING, Reason.QUEUED),
    "RUNNING": (ReplicaState.RUNNING, None),
    "SUCCEEDED": (ReplicaState.SUCCEEDED, Reason.COMPLETED),
    "FAILED": (ReplicaState.FAILED, Reason.ERROR),
    "TIMED_OUT": (ReplicaState.FAILED, Reason.TIMEOUT),
    "STOPPED": (ReplicaState.CANCELLED, Reason.CANCEL_REQUESTED),
}
REASONS = {
    "OutOfMemory": Reason.OOM,
    "GangFailed": Reason.GANG_FAILED,
    "Preempted": Reason.PREEMPTED,
}


def ask(call: Callable[[], T]) -> T:
    """Call the cloud, with its errors in the words of the protocol."""
    try:
        return call()
    except CloudError as error:
        raise translated(error) from error


def translated(error: CloudError) -> BackendError:
    """An error of the cloud in the words of the protocol."""
    return ERRORS.get(error.code, BackendError)(f"the toy cloud says {error.code}")


class ToyExecutor(BaseExecutor):
    """Launches jobs in a toy cloud."""

    backend_name = "toy"
    supports_inter_replica_network = False

    def __init__(self, cloud: ToyCloud, **options: Any) -> None:
        super().__init__(**options)
        self.cloud = cloud
        scope = "gang" if cloud.gang else "replica"
        self.capabilities = Capabilities(
            scope, scope, result_channel="the job's output", preemptible=True, retention=86400.0
        )

    # --- launching ---

    def _plan(self, request: RunRequest) -> list[dict[str, Any]]:
        for name in ("gpu", "cpu", "memory", "spot"):
            if getattr(request, name):
                raise InvalidRequestError(
                    f"{name}={getattr(request, name)!r}: the toy cloud has no such thing; leave it out"
                )
        return [
            {
                "name": f"{request.run_id}-{spec.rank}",
                "run_id": request.run_id,
                "spec": asdict(spec),
                "env": {**request.env, **environment(spec)},
                "timeout": request.timeout,
                "tags": {
                    "rank": spec.rank,
                    "fingerprint": request.fingerprint(),
                    "of": len(request.ranks),
                },
            }
            for spec in request.specs()
        ]

    def _submit(self, request: RunRequest) -> list[ReplicaHandle]:
        plan = self._plan(request)
        there = ask(lambda: self.cloud.describe(request.run_id))
        if any(job.body["tags"]["fingerprint"] != request.fingerprint() for job in there.values()):
            raise RunConflictError(f"run {request.run_id!r} was launched with other arguments")
        made = []
        try:
            for body in plan:
                made.append(body["name"])
                self._create(body)
        except BaseException as error:
            survivors = self._stop_all(request, made)
            if isinstance(error, BackendError):
                raise LaunchError(
                    f"run {request.run_id!r} could not be launched: {error}", survivors
                ) from error
            raise
        return self._handles(request.run_id, request.ranks, request.world_size)

    def _create(self, body: dict[str, Any]) -> None:
        for attempt in range(3):
            try:
                self.cloud.create(body["name"], body)
            except CloudError as error:
                if (
                    error.code == "AlreadyExists"
                ):  # of an earlier launch, or of a try whose answer was lost
                    return
                if attempt == 2 or not issubclass(
                    ERRORS.get(error.code, BackendError), UnavailableError
                ):
                    raise translated(error) from error
            else:
                return

    def _stop_all(self, request: RunRequest, names: Sequence[str]) -> list[ReplicaHandle]:
        left = []
        for handle in self._handles(request.run_id, request.ranks, request.world_size):
            if handle.metadata["name"] in names:
                try:
                    self._stop(handle)
                except BackendError:
                    left.append(handle)
        return left

    def _handles(self, run_id: str, ranks: Sequence[int], world_size: int) -> list[ReplicaHandle]:
        return [
            ReplicaHandle(
                rank,
                self.backend_name,
                {"name": f"{run_id}-{rank}"},
                run_id=run_id,
                world_size=world_size,
            )
            for rank in ranks
        ]

    # --- watching ---

    def _observe_run(
        self, handles: Sequence[ReplicaHandle]
    ) -> Mapping[ReplicaHandle, ReplicaStatus]:
        jobs = ask(lambda: self.cloud.describe(handles[0].run_id))
        return {
            handle: self._status(jobs[handle.metadata["name"]])
            for handle in handles
            if handle.metadata["name"] in jobs
        }

    def _status(self, job: Job) -> ReplicaStatus:
        state, reason = STATES[job.status]
        reason = (
            REASONS.get(job.reason, reason) if not job.live or job.reason == "Preempted" else reason
        )
        if job.stopping:
            reason = Reason.CANCEL_REQUESTED
        text = (
            ""
            if state is not ReplicaState.FAILED
            else f"exited with code {job.exit_code} ({reason})"
        )
        return ReplicaStatus(
            state, job.attempt, reason, job.stopping, job.exit_code, message=text, native=job.status
        )

    def _job(self, handle: ReplicaHandle) -> Job:
        jobs = ask(lambda: self.cloud.describe(handle.run_id))
        if handle.metadata["name"] not in jobs:
            raise ReplicaNotFoundError(f"the toy cloud has no job {handle.metadata['name']!r}")
        return jobs[handle.metadata["name"]]

    def _result(self, handle: ReplicaHandle) -> Any:
        return self._job(handle).output

    def _logs(self, handle: ReplicaHandle, query: LogQuery) -> Iterator[str]:
        lines = [
            line
            for line in self._job(handle).log
            if query.regex is None or re.search(query.regex, line)
        ]
        return iter(lines if query.n_lines is None else lines[-query.n_lines :])

    # --- ending and finding ---

    def _stop(self, handle: ReplicaHandle) -> None:
        try:
            self.cloud.stop(handle.metadata["name"])
        except CloudError as error:
            if error.code != "NotFound":
                raise translated(error) from error

    def _purge(self, handle: ReplicaHandle) -> None:
        jobs = ask(lambda: self.cloud.describe(handle.run_id))
        if alive := [name for name, job in jobs.items() if job.live]:
            raise InvalidRequestError(f"{', '.join(alive)} have not ended: cancel them first")
        ask(lambda: self.cloud.delete(handle.run_id))

    def _list_runs(self) -> list[str]:
        return ask(self.cloud.runs)

    def _attach(self, run_id: str) -> list[ReplicaHandle]:
        jobs = ask(lambda: self.cloud.describe(run_id))
        if not jobs:
            raise ReplicaNotFoundError(f"the toy cloud has no run {run_id!r}")
        specs = sorted((job.body["spec"] for job in jobs.values()), key=lambda spec: spec["rank"])
        return self._handles(run_id, [spec["rank"] for spec in specs], specs[0]["world_size"])
