"""The backend for the toy cloud: one job per replica."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from toy_cloud import LOG_PAGE, OUTPUT_BYTES, RETENTION, CloudError, Job, ToyCloud
from toy_logs import LineReader, chosen, of_stream
from toy_resources import resources
from toy_states import ERRORS, MARK, ask, is_ours, result_of, status_of, translated

from diloco_protocol import (
    BackendError,
    BaseExecutor,
    Capabilities,
    InvalidRequestError,
    LogQuery,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaStatus,
    RunConflictError,
    RunRequest,
    UnavailableError,
    environment,
    retry,
)
from diloco_protocol.backend import (
    Look,
    all_or_nothing,
    check_ended,
    check_metadata,
    follow,
    redact,
    redact_json,
)

T = TypeVar("T")

TRIES = 3
PATIENCE = 30.0
"""Seconds for which a log may be out of reach while it is read."""


class ToyExecutor(BaseExecutor):
    """Launches jobs in a toy cloud. Keeps nothing, so that threads may share it."""

    backend_name = "toy"
    supports_inter_replica_network = False

    def __init__(self, cloud: ToyCloud, **options: Any) -> None:
        super().__init__(**options)
        self.cloud = cloud
        scope = "gang" if cloud.gang else "replica"
        self.capabilities = Capabilities(
            cancel_scope=scope,
            failure_scope=scope,
            result_channel="the job's output",
            max_result_bytes=OUTPUT_BYTES,
            log_streams=("combined", "stdout", "stderr"),
            preemptible=True,
            retention=RETENTION,
        )

    # --- launching ---

    def _check_request(self, request: RunRequest) -> None:
        resources(request)  # it refuses what there is not

    def _plan(self, request: RunRequest) -> list[dict[str, Any]]:
        bodies = self._bodies(request)
        for body in bodies:
            body["env"] = {name: redact(name, value) for name, value in body["env"].items()}
            body["spec"] = redact_json(body["spec"])
        return bodies

    def _bodies(self, request: RunRequest) -> list[dict[str, Any]]:
        """What is sent: a request per replica."""
        return [
            {
                "name": f"{request.run_id}-{spec.rank}",
                "run_id": request.run_id,
                "spec": asdict(spec),
                "env": {**request.env, **environment(spec)},
                "secrets": request.secrets,
                "labels": request.labels,
                "resources": resources(request),
                "timeout": request.timeout,
                "restarts": request.max_restarts,
                "fingerprint": request.fingerprint(),
            }
            for spec in request.specs()
        ]

    def _where(self) -> str:
        return self.cloud.account

    def _submit(self, request: RunRequest) -> list[ReplicaHandle]:
        uid = uuid.uuid4().hex  # tells what this call has created from what was there

        def take_back(_: BaseException) -> tuple[list[ReplicaHandle], str]:
            return self._withdraw(request, uid), "cancel the survivors of this error"

        jobs = self._same(request)
        with all_or_nothing(take_back):
            for body in self._bodies(request):
                if body["name"] not in jobs:
                    self._create(request, body, uid)
            jobs = self._same(request)
            if len(jobs) < len(request.ranks):
                raise UnavailableError("another launch of this run was given up at the same moment")
        return self._handles(jobs.values())

    def _same(self, request: RunRequest) -> dict[str, Job]:
        """The jobs that the run has already; refused if they are of another launch."""
        jobs = ask(lambda: self.cloud.describe(request.run_id))
        if not all(map(is_ours, jobs.values())):
            raise RunConflictError(
                f"there are jobs of run {request.run_id!r} that diloco has not launched: choose "
                "another run_id"
            )
        if any(job.body["fingerprint"] != request.fingerprint() for job in jobs.values()):
            raise RunConflictError(
                f"run {request.run_id!r} was launched with other arguments: choose another run_id, "
                "or purge it first"
            )
        if any(job.removing for job in jobs.values()):
            raise RunConflictError(
                f"run {request.run_id!r} is still being removed: wait, or choose another run_id"
            )
        return jobs

    def _create(self, request: RunRequest, body: dict[str, Any], uid: str) -> None:
        for left in reversed(range(TRIES)):
            try:
                self.cloud.create(body["name"], body, uid)
            except CloudError as error:
                if error.code == "AlreadyExists":  # somebody launches the same run at this moment
                    self._same(request)
                    return
                if left and ERRORS.get(error.code) is UnavailableError:
                    continue  # if only the answer was lost, the next try finds the job
                raise translated(error) from error
            return

    def _withdraw(self, request: RunRequest, uid: str) -> list[ReplicaHandle]:
        """Remove what this launch has created; returns what may have survived."""
        try:
            jobs = ask(lambda: self.cloud.describe(request.run_id))
        except BackendError:
            return [
                self._handle(request.run_id, rank, request.world_size, uid)
                for rank in request.ranks
            ]
        survivors = []
        for handle in self._handles(job for job in jobs.values() if job.uid == uid):
            try:
                self._delete(handle)
            except BackendError:
                survivors.append(handle)
        return survivors

    def _handles(self, jobs: Iterable[Job]) -> list[ReplicaHandle]:
        handles = [
            self._handle(
                job.body["run_id"],
                job.body["spec"]["rank"],
                job.body["spec"]["world_size"],
                job.uid,
            )
            for job in jobs
        ]
        return sorted(handles, key=lambda handle: handle.rank)

    def _handle(self, run_id: str, rank: int, world_size: int, uid: str) -> ReplicaHandle:
        # With the uid in it, a handle is never that of a later run of the same name.
        metadata = {"account": self.cloud.account, "name": f"{run_id}-{rank}", "uid": uid}
        return ReplicaHandle(
            rank, self.backend_name, metadata, run_id=run_id, world_size=world_size
        )

    def _check_handle(self, handle: ReplicaHandle) -> None:
        check_metadata(handle, "a job", {"account", "name", "uid"})
        if (account := handle.metadata["account"]) != self.cloud.account:
            raise InvalidRequestError(
                f"this handle belongs to the account {account!r}, and this executor works in "
                f"{self.cloud.account!r}"
            )

        # A handle may come from anywhere: what it leads to is of its own run, or it leads to
        # nothing.
        if handle.metadata["name"] != (name := f"{handle.run_id}-{handle.rank}"):
            raise InvalidRequestError(
                f"this handle is of the job {name!r}, and its metadata names "
                f"{handle.metadata['name']!r}"
            )

    # --- watching ---

    def _observe_run(
        self, handles: Sequence[ReplicaHandle]
    ) -> Mapping[ReplicaHandle, ReplicaStatus]:
        jobs = self._jobs(handles[0].run_id)
        return {handle: self._status(jobs[handle]) for handle in handles if handle in jobs}

    def _jobs(self, run_id: str) -> dict[ReplicaHandle, Job]:
        jobs = ask(lambda: self.cloud.describe(run_id))
        return {self._handles([job])[0]: job for job in jobs.values() if is_ours(job)}

    def _job(self, handle: ReplicaHandle) -> Job:
        jobs = self._jobs(handle.run_id)
        if handle not in jobs:
            raise ReplicaNotFoundError(
                f"the toy cloud has no job {handle.metadata['name']!r} any more"
            )
        return jobs[handle]

    def _status(self, job: Job) -> ReplicaStatus:
        return status_of(job)

    def _result(self, handle: ReplicaHandle) -> Any:
        return result_of(self._job(handle))

    def _logs(self, handle: ReplicaHandle, query: LogQuery) -> Iterator[str]:
        self._job(handle)  # a log that is gone is an error now, not at the first line
        lines = chosen(self._lines(handle, query), query)
        return lines if query.n_lines is None else iter(list(lines)[-query.n_lines :])

    def _lines(self, handle: ReplicaHandle, query: LogQuery) -> Iterator[tuple[float, str]]:
        names = (handle.metadata["name"], handle.metadata["uid"])
        reader, place = LineReader(), 0

        def ended() -> bool:
            return not self._again(lambda: self._job(handle)).live

        def read(_: bool) -> Generator[tuple[float, str], None, Look]:
            nonlocal place
            chunks = self._again(lambda: ask(lambda: self.cloud.log(*names, place)))
            place += len(chunks)
            yield from reader.feed(of_stream(chunks, query.streams))
            return Look(fresh=bool(chunks), whole=len(chunks) < LOG_PAGE)

        yield from follow(query, read, ended, self._backoff, self.cloud.clock)
        yield from reader.finish()

    def _again(self, call: Callable[[], T]) -> T:
        # A follower of hours meets a broken connection now and then, and it must not cost the rest
        # of the log.
        return retry(call, self._backoff, timeout=PATIENCE)

    # --- ending and finding ---

    def _stop(self, handle: ReplicaHandle) -> None:
        names = (handle.metadata["name"], handle.metadata["uid"])
        with contextlib.suppress(ReplicaNotFoundError):  # what is gone has ended
            ask(lambda: self.cloud.stop(*names))

    def _purge(self, handle: ReplicaHandle) -> None:
        jobs = self._jobs(handle.run_id)
        if handle not in jobs:
            return  # it is gone, and what has its name now is another run
        check_ended(handle.run_id, [one.rank for one, job in jobs.items() if job.live])
        for one in sorted(jobs, key=lambda one: one == handle):
            self._delete(one)  # the given one last: if this breaks off, it still finds the others

    def _delete(self, handle: ReplicaHandle) -> None:
        names = (handle.metadata["name"], handle.metadata["uid"])
        with contextlib.suppress(ReplicaNotFoundError):
            ask(lambda: self.cloud.delete(*names))

    def _rendezvous(self, handle: ReplicaHandle) -> str | None:
        uri: str | None = self._job(handle).body["spec"]["rendezvous_uri"]
        return uri

    def _list_runs(self) -> list[str]:
        runs, after = ask(lambda: self.cloud.runs(having=MARK))
        while after is not None:
            page, after = ask(lambda: self.cloud.runs(after, MARK))  # noqa: B023 - called at once
            runs += page
        return runs

    def _attach(self, run_id: str) -> list[ReplicaHandle]:
        jobs = self._jobs(run_id)
        if not jobs:
            raise ReplicaNotFoundError(f"the toy cloud has no run {run_id!r}")
        return sorted(jobs, key=lambda handle: handle.rank)
