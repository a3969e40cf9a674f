"""The backend for the toy cloud: one job per replica."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from toy_cloud import RETENTION, CloudError, Job, ToyCloud

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
            scope, scope, result_channel="the job's output", preemptible=True, retention=RETENTION
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
        uids = {name: job.uid for name, job in there.items()}
        if len(uids) == len(plan):
            return self._handles(request.run_id, request.world_size, uids)
        try:
            for body in plan:
                uids[body["name"]] = self._create(body)
        except BaseException as error:
            survivors = self._stop_all(request)
            if isinstance(error, BackendError):
                raise LaunchError(
                    f"run {request.run_id!r} could not be launched: {error}", survivors
                ) from error
            raise
        return self._handles(request.run_id, request.world_size, uids)

    def _create(self, body: dict[str, Any]) -> str:
        for attempt in range(3):
            try:
                return self.cloud.create(body["name"], body)
            except CloudError as error:
                if (
                    error.code == "AlreadyExists"
                ):  # of an earlier launch, or of a try whose answer was lost
                    return ask(lambda: self.cloud.describe(body["run_id"]))[body["name"]].uid
                if attempt == 2 or not issubclass(
                    ERRORS.get(error.code, BackendError), UnavailableError
                ):
                    raise translated(error) from error
        raise AssertionError("the last attempt returns or raises")

    def _stop_all(self, request: RunRequest) -> list[ReplicaHandle]:
        """End what was started; gives what goes on."""
        try:
            handles = self._attach(request.run_id)
        except ReplicaNotFoundError:
            return []
        left = []
        for handle in handles:
            try:
                self._stop(handle)
            except BackendError:
                left.append(handle)
        return left

    def _handles(
        self, run_id: str, world_size: int, uids: Mapping[str, str]
    ) -> list[ReplicaHandle]:
        return [
            ReplicaHandle(
                int(name.rpartition("-")[2]),
                self.backend_name,
                {"name": name, "uid": uid, "account": self.cloud.account},
                run_id=run_id,
                world_size=world_size,
            )
            for name, uid in uids.items()
        ]

    # --- watching ---

    def _observe_run(
        self, handles: Sequence[ReplicaHandle]
    ) -> Mapping[ReplicaHandle, ReplicaStatus]:
        jobs = ask(lambda: self.cloud.describe(handles[0].run_id))
        return {
            handle: self._status(job)
            for handle in handles
            if (job := self._find_in(jobs, handle)) is not None
        }

    def _find_in(self, jobs: Mapping[str, Job], handle: ReplicaHandle) -> Job | None:
        """A replica's job; not one of the same name that was made later."""
        job = jobs.get(handle.metadata["name"])
        return job if job is not None and job.uid == handle.metadata["uid"] else None

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
            state, job.attempt, reason, job.stopping, job.exit_code, job.signal, message=text,
            started_at=job.started_at, finished_at=job.finished_at, native=job.status,
        )  # fmt: skip

    def _job(self, handle: ReplicaHandle) -> Job:
        job = self._find_in(ask(lambda: self.cloud.describe(handle.run_id)), handle)
        if job is None:
            raise ReplicaNotFoundError(f"the toy cloud has no job {handle.metadata['name']!r}")
        return job

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

    def _check(self, handle: ReplicaHandle) -> None:
        super()._check(handle)
        if handle.metadata["account"] != self.cloud.account:
            raise InvalidRequestError(
                f"this handle belongs to the account {handle.metadata['account']!r}, and this executor works in "
                f"{self.cloud.account!r}"
            )

    def _stop(self, handle: ReplicaHandle) -> None:
        try:
            self.cloud.stop(handle.metadata["name"], handle.metadata["uid"])
        except CloudError as error:
            if error.code != "NotFound":
                raise translated(error) from error

    def _purge(self, handle: ReplicaHandle) -> None:
        jobs = ask(lambda: self.cloud.describe(handle.run_id, "purge"))
        if self._find_in(jobs, handle) is None:
            return
        if alive := [name for name, job in jobs.items() if job.live]:
            raise InvalidRequestError(f"{', '.join(alive)} have not ended: cancel them first")
        ask(lambda: self.cloud.delete(handle.run_id))

    def _list_runs(self) -> list[str]:
        return ask(self.cloud.runs)

    def _attach(self, run_id: str) -> list[ReplicaHandle]:
        jobs = ask(lambda: self.cloud.describe(run_id, "find"))
        if not jobs:
            raise ReplicaNotFoundError(f"the toy cloud has no run {run_id!r}")
        uids = {
            name: job.uid
            for name, job in sorted(jobs.items(), key=lambda item: item[1].body["spec"]["rank"])
        }
        return self._handles(run_id, next(iter(jobs.values())).body["spec"]["world_size"], uids)
