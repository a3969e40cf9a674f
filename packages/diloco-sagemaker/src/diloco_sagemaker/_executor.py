"""The executor: the verbs of the protocol, carried out with training jobs."""

from __future__ import annotations

import copy
import logging
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

from diloco_protocol import (
    BackendError,
    Backoff,
    BaseExecutor,
    Capabilities,
    DilocoError,
    Finding,
    InvalidRequestError,
    LaunchError,
    LogQuery,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaStatus,
    RunConflictError,
    RunRequest,
    UnavailableError,
)
from diloco_protocol.backend import all_or_nothing, cancel_all, refuse, takes

from ._client._calls import Client
from ._client._jobs import Jobs
from ._request._job_requests import MAX_RESULT_BYTES, job_requests, longest_timeout
from ._request._names import LAUNCH, job_prefix
from ._request._options import SageMakerOptions
from ._request._redacted import redacted_job, secret_names
from ._state._facts import Summary
from ._state._handles import LAUNCH_ID, check_handle, make_handle, unseen
from ._verbs._cancel import cancel, check_met
from ._verbs._check import check_launch
from ._verbs._launch import Launch, Launcher, Made
from ._verbs._logs import JobLog
from ._verbs._purge import purge
from ._verbs._runs import Runs
from ._verbs._withdraw import withdraw

_SECONDS_TO_BE_TAKEN = 10.0
"""Seconds in which no job is ended and deleted, and its name taken; AWS states no number."""
_LEFT_OUT = frozenset({"InputDataConfig", "ResourceConfig", "StoppingCondition"})
"""Fields of an overlay that the job which tries a rendezvous does not have.

It needs no GPU and no data, and is over in a minute.
"""


class SageMakerExecutor(BaseExecutor):
    """Executor that runs replicas as SageMaker training jobs: one job of one instance per rank.

    Jobs are named after run and rank. All that is known about a run is in its jobs, so any executor
    in any process can answer for any handle. The replicas' image needs ``diloco-protocol``, since
    the container starts its runner. Safe to share between threads.

    ``gpu``: ``"H100"``, ``"H100:8"``, ``"2"`` for two of any model, or an instance type such as
    ``"ml.g5.12xlarge"``. Cancelling ends a single replica. ``cpu=``, ``memory=`` and ``secrets=``
    are refused: see the README.

    Its arguments are the fields of :class:`SageMakerOptions`: ``role_arn``, ``image_uri`` and
    ``output_s3_path`` are required.

    Raises:
        InvalidRequestError: A value is not allowed; says what was given and what is allowed.
    """

    backend_name = "sagemaker"
    supports_inter_replica_network = False
    capabilities = Capabilities(
        cancel_scope="replica",
        result_channel="a file in S3, below the job's output",
        max_result_bytes=MAX_RESULT_BYTES,
        preemptible=True,
    )

    options_class = SageMakerOptions
    replica_word = "job"
    probe_seconds = 1200.0

    @takes(SageMakerOptions)
    def __init__(self, *arguments: Any, **options: Any) -> None:
        chosen = SageMakerOptions(*arguments, **options)
        super().__init__(**chosen.of_base(Backoff(first=1.0, factor=1.5, cap=20.0)))
        self._options = chosen
        self.capabilities = replace(type(self).capabilities, max_timeout=longest_timeout(chosen))
        self._client = Client(chosen, self._backoff)
        self._jobs = Jobs(self._client)
        self._runs = Runs(self._client, self._jobs, self._backoff, chosen, self._patiently)
        self._launcher = Launcher(self._runs)

    def close(self) -> None:
        """Close idle connections; see :meth:`BaseExecutor.close`."""
        self._client.close()

    # --- launching ---

    def _check_request(self, request: RunRequest) -> None:
        whole = (
            "a replica has a whole instance, whose type decides. Give gpu= an instance type, or "
            "the executor instance_type= or cpu_instance_type="
        )
        secrets = (
            "SageMaker hands no secrets to training jobs. Keep them in AWS Secrets Manager, let "
            "the execution role read them (secretsmanager:GetSecretValue), and have the program "
            "ask for them"
        )
        refuse(request, "SageMaker", {"secrets": secrets, "cpu": whole, "memory": whole})

    def _plan(self, request: RunRequest) -> list[dict[str, Any]]:
        specs = request.specs(grace=self._options.grace)
        jobs = job_requests(request, self._options)
        return [redacted_job(job, spec) for job, spec in zip(jobs, specs, strict=True)]

    def _findings(self, request: RunRequest) -> list[Finding]:
        jobs = job_requests(request, self._options)
        return check_launch(self._client, request.run_id, jobs, self._patiently)

    def _probe(self, patience: float) -> tuple[Any, dict[str, Any]]:
        """Return an executor for a job without GPU and data; it waits for quota as long."""
        probe = copy.copy(self)
        overlay = self._options.request_overlay or {}
        probe._options = replace(  # noqa: SLF001 - of this very class
            self._options,
            pending_timeout=None,
            platform_retries=0,
            volume_size_gb=None,
            quota_timeout=min(self._options.quota_timeout, patience),
            request_overlay={key: overlay[key] for key in overlay.keys() - _LEFT_OUT},
        )
        return probe, {"spot": False}

    def _where(self) -> str:
        with suppress(DilocoError):  # a plan needs no region, and a launch says what is wrong
            return self._client.region
        return ""

    def _submit(self, request: RunRequest) -> list[ReplicaHandle]:
        jobs = job_requests(request, self._options)
        if shown := secret_names(jobs[0]):
            logging.getLogger("diloco_sagemaker").warning(
                (
                    "named like secrets: %s. Anyone who may describe training jobs can read them: "
                    "keep them in AWS Secrets Manager"
                ),
                ", ".join(shown),
            )
        account = self._patiently(lambda: self._client.account)
        region = self._client.region
        launch_id = uuid.uuid4().hex[:LAUNCH_ID]
        for job in jobs:
            job["HyperParameters"][LAUNCH] = launch_id
        requests = {str(job["TrainingJobName"]): job for job in jobs}
        launch = Launch(requests, launch_id, self._backoff.clock())

        def handle(rank: int, created: int | str) -> ReplicaHandle:
            return make_handle(request.run_id, rank, request.world_size, created, region, account)

        def unsure(job_names: Sequence[str]) -> list[ReplicaHandle]:
            ranks = dict(zip(launch.requests, request.ranks, strict=True))
            if job_names:
                self._runs.launched(request.run_id)
            # Distinguishes each job from later ones of the same name, even if their launch is the
            # same.
            created: dict[str, int | str] = {
                name: job.created
                if launch.of(name) is Made.THERE
                else unseen(launch.fingerprint(name), created=job.created)
                for name, job in launch.met.items()
            }
            return [
                handle(
                    ranks[name],
                    created.get(name) or unseen(launch.fingerprint(name), launch_id=launch_id),
                )
                for name in sorted(job_names)
            ]

        def take_back(_: BaseException) -> tuple[list[ReplicaHandle], str]:
            left, interrupt = withdraw(self._runs, launch)
            survivors = unsure(left)
            alive = ", ".join(handle.metadata["job_name"] for handle in survivors)
            note = (
                f"{len(survivors)} training jobs of this launch may be running, and cost money "
                f"until they are cancelled: its survivors ({alive})"
            )
            if interrupt is not None:
                if survivors:
                    interrupt.add_note(note)
                raise interrupt
            return survivors, note

        with all_or_nothing(take_back):
            self._launcher.create(launch, request.run_id, self._options.quota_timeout)
            try:
                created = self._patiently(lambda: self._created(request, launch))
            except RunConflictError:
                raise
            except BackendError as error:
                raise LaunchError(
                    f"run {request.run_id!r} was started, but its jobs could not be looked up: "
                    f"{error}. They are running: they are in this error's survivors, and "
                    "attach(run_id) finds them too",
                    unsure(list(launch.requests)),
                ) from error
            self._runs.launched(request.run_id)
            return [handle(rank, created[rank]) for rank in request.ranks]

    def _created(self, request: RunRequest, launch: Launch) -> dict[int, int]:
        """Return when the jobs of a launch were created.

        The times come from one list; jobs that it lacks are described one by one. If the launch has
        taken long enough for a job to be removed, and its name to be taken, all are looked at.

        Raises:
            RunConflictError: One of them was ended meanwhile.
            UnavailableError: One of them is not there yet.
        """
        listed = list(self._jobs.of_run(request.run_id).values())
        jobs: dict[str, Summary] = {job.name: job for job in listed}
        if self._backoff.clock() - launch.began >= _SECONDS_TO_BE_TAKEN:
            jobs = {**self._jobs.details(listed, job_prefix(request.run_id))}
        jobs |= self._jobs.described([name for name in launch.requests if name not in jobs])
        times = {}
        for rank, name in zip(request.ranks, launch.requests, strict=True):
            job = jobs.get(name)
            launch.check_met(name, job)
            if job is None:
                raise UnavailableError(
                    f"there is no training job {name}, although it was created: it is about to "
                    "appear, or was deleted"
                )
            times[rank] = job.created
        return times

    # --- watching ---

    def _within(self, seconds: float | None) -> AbstractContextManager[None]:
        """Limit the wait for answers of AWS: it ends at most 5 s after the time is over."""
        until = math.inf if seconds is None else self._backoff.clock() + seconds
        return self._client.until(until)

    def _observe_run(
        self, handles: Sequence[ReplicaHandle]
    ) -> Mapping[ReplicaHandle, ReplicaStatus]:
        return self._runs.observe(handles)

    def _result(self, handle: ReplicaHandle) -> Any:
        return self._runs.result(handle)

    def _logs(self, handle: ReplicaHandle, query: LogQuery) -> Iterator[str]:
        return JobLog(self._runs, handle).lines(query)

    # --- ending and finding ---

    def _stop(self, handle: ReplicaHandle) -> None:
        cancel(self._runs, handle)

    def _purge(self, handle: ReplicaHandle) -> None:
        purge(self._runs, handle)

    def cancel_run(self, run_id: str) -> None:
        """End all replicas of a run; see :meth:`BaseExecutor.cancel_run`.

        Takes two calls per rank, and a few for the run.
        """
        try:
            handles = self._find(run_id)
        except ReplicaNotFoundError:
            super().cancel_run(run_id)  # a journal may know it
            return
        cancel_all(handles, lambda handle: cancel(self._runs, handle, seen=True))
        self._patiently(lambda: check_met(self._runs, handles))

    def _rendezvous(self, handle: ReplicaHandle) -> str | None:
        return self._runs.rendezvous(handle)

    def _list_runs(self) -> list[str]:
        return self._runs.all()

    def _attach(self, run_id: str) -> list[ReplicaHandle]:
        return self._runs.find(run_id)

    def _check_handle(self, handle: ReplicaHandle) -> None:
        check_handle(handle)
        region = handle.metadata["region"]
        if region != self._client.region:
            raise InvalidRequestError(
                f"this handle is of the region {region}, and this executor asks "
                f"{self._client.region}: make one with region={region!r}"
            )

    def _recorded(self, handle: ReplicaHandle) -> tuple[ReplicaStatus, Any] | None:
        end = super()._recorded(handle)
        if end is not None:  # a journal may be shared with another account
            self._patiently(lambda: self._runs.check_account(handle, None))
        return end

    def _is_ours(self, handle: ReplicaHandle) -> bool:
        if not super()._is_ours(handle):
            return False
        return handle.metadata["account"] == self._patiently(lambda: self._client.account)
