"""The verbs, on Indexed Jobs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Literal

from diloco_protocol import (
    BackendError,
    Backoff,
    Capabilities,
    InvalidRequestError,
    LaunchError,
    Option,
    OutcomeMessage,
    Plan,
    ReplicaHandle,
    ReplicaStatus,
    RunJournal,
    RunRequest,
)
from diloco_protocol.backend import check_restarts

from . import _names as names
from ._check import Finding, check_cluster, check_rendezvous
from ._client import Client
from ._cluster import Cluster
from ._facts import JobFacts, read_job
from ._handles import check_handle, find_job, make_handles
from ._launch import UnknownLaunchError, check_service_account, create, withdraw
from ._log_verbs import LogVerbs
from ._manifest import job_manifest, redacted
from ._options import OPTIONS
from ._runs import Runs
from ._settings import check_settings


class EKSExecutor(LogVerbs):
    """Runs replicas as the pods of one Indexed Job per run, on EKS or any Kubernetes from 1.33 on.

    All that is known about a run is in its Job and pods, so any executor in any process answers for any handle. The
    replicas' image needs ``diloco-protocol``, whose runner is what the container starts. Safe to share between threads.

    ``gpu``: ``"H100"``, ``"A100:8"``, ``"L40S:4"``, or ``"2"`` for two of any model. ``secrets``: ``"name/key"`` of
    Secrets in the run's namespace. Cancel ends the whole run. See the README for what the cluster must allow.

    Args:
        image: The replicas' container image.
        namespace: Where runs are launched and looked for.
        service_account_name: Of the pods; where IRSA or Pod Identity hang their AWS role on. Must exist.
        node_selector: Of the pods. Where it names a GPU model, instance type or capacity itself, our affinity does not.
        tolerations: Of the pods; the one for GPU nodes is added.
        runtime_class_name: gVisor, Kata and the like; warns together with GPUs.
        command: What starts the runner, which gets its arguments behind it; default ``python -m diloco_protocol.runner``.
        cpu_request: CPU of a replica where the launch does not say; request and limit.
        memory_request: Memory likewise.
        ttl_seconds_after_finished: Seconds after its end for which a run can be asked about; None for ever. Later there is
            only the journal.
        backoff_limit: Restarts of a failed replica where the launch does not say (``max_restarts``).
        gpu_resource_key: The extended resource of GPUs.
        run_id: Prefix of the names of runs that are not named by the caller.
        batch_api: A ``kubernetes.client.BatchV1Api`` to use; then ``context`` and ``kubeconfig`` are not read.
        core_api: A ``kubernetes.client.CoreV1Api`` to use with it.
        context: Of the kubeconfig.
        kubeconfig: A file. Without these two: the pod's own account in a cluster, else ``$KUBECONFIG``, else
            ``~/.kube/config``.
        env: Variables for every launch; the launch's own ``env`` wins.
        labels: Labels of Jobs and pods.
        annotations: Annotations of Jobs; any text.
        owner: Label ``diloco.dev/owner``.
        on_replica_failure: ``"fail_run"``: one replica that has failed for good ends the run. ``"continue"``: the others go
            on, for elastic membership.
        pending_timeout: Seconds that the wait for nodes and images may add to the run before the cluster ends it; with
            ``timeout`` this makes the Job's deadline. None: no deadline but the runners'.
        grace: Seconds between SIGTERM and SIGKILL.
        queue: Kueue's local queue.
        gpu_types: GPU name → node label → values, to add to our table or replace entries of it.
        ephemeral_storage: Local disk of a replica, such as ``"100Gi"``.
        shm_size: Size of ``/dev/shm``, such as ``"8Gi"``; counts as memory.
        efa: EFA devices of a replica.
        pod_overlay: A pod template that is merged over ours by name (volumes, pull secrets, security context, …).
        request_timeout: Seconds for a connection to the cluster, and between two pieces of an answer.
        retry_timeout: Seconds for which calls other than polls are tried again while the cluster throttles or fails.
        journal: Where launches and ends are written down beyond the TTL.
        backoff: Pauses of `collect` and of retries, with clock and sleep.
        clock: Unix seconds, for tests.

    Raises:
        InvalidRequestError: A value is not allowed.
    """

    backend_name = "eks"
    supports_inter_replica_network = False
    capabilities = Capabilities(
        cancel_scope="gang",
        result_channel="termination message of 4 KiB; larger ones in marked lines of the log",
        max_result_bytes=OutcomeMessage.max_result_bytes,
        preemptible=True,
        remembers_ended=False,
    )

    def __init__(
        self,
        image: str,
        *,
        namespace: str = "default",
        service_account_name: str | None = None,
        node_selector: Mapping[str, str] | None = None,
        tolerations: Sequence[Mapping[str, Any]] | None = None,
        runtime_class_name: str | None = None,
        command: Sequence[str] | None = None,
        cpu_request: str = "4",
        memory_request: str = "16Gi",
        ttl_seconds_after_finished: int | None = 3600,
        backoff_limit: int = 0,
        gpu_resource_key: str = "nvidia.com/gpu",
        run_id: str | None = None,
        batch_api: Any = None,
        core_api: Any = None,
        context: str | None = None,
        kubeconfig: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        owner: str | None = None,
        on_replica_failure: Literal["fail_run", "continue"] = "fail_run",
        pending_timeout: float | None = 3600,
        grace: float = 10.0,
        queue: str | None = None,
        gpu_types: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
        ephemeral_storage: str | None = None,
        shm_size: str | None = None,
        efa: int = 0,
        pod_overlay: Mapping[str, Any] | None = None,
        request_timeout: float = 30.0,
        retry_timeout: float = 30.0,
        journal: RunJournal | None = None,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(
            run_id=run_id,
            journal=journal,
            backoff=backoff or Backoff(first=1.0, factor=1.5, cap=15.0),
            env=env,
            max_restarts=check_restarts("backoff_limit", backoff_limit),
        )
        self._settings = check_settings(
            image=image, namespace=namespace, service_account_name=service_account_name, node_selector=node_selector,
            tolerations=tolerations, runtime_class_name=runtime_class_name, command=command, cpu_request=cpu_request,
            memory_request=memory_request, ttl_seconds_after_finished=ttl_seconds_after_finished,
            gpu_resource_key=gpu_resource_key, gpu_types=gpu_types, labels=labels, annotations=annotations, owner=owner,
            on_replica_failure=on_replica_failure, pending_timeout=pending_timeout, grace=grace, queue=queue,
            ephemeral_storage=ephemeral_storage, shm_size=shm_size, efa=efa, pod_overlay=pod_overlay,
        )  # fmt: skip
        for name, seconds in (
            ("request_timeout", request_timeout),
            ("retry_timeout", retry_timeout),
        ):
            if (
                isinstance(seconds, bool)
                or not isinstance(seconds, (int, float))
                or not 0 <= seconds < 86400
            ):
                raise InvalidRequestError(
                    f"{name} must be a number of seconds from 0, not {seconds!r}"
                )
        self.capabilities = replace(
            type(self).capabilities,
            retention=ttl_seconds_after_finished,
            failure_scope="gang" if on_replica_failure == "fail_run" else "replica",
        )
        self._patience = float(retry_timeout)
        self._client = Client(
            context=context, kubeconfig=kubeconfig, batch_api=batch_api, core_api=core_api,
            request_timeout=float(request_timeout) or 0.001,
        )  # fmt: skip
        self._cluster = Cluster(self._client)
        self._runs = Runs(self._client, self._cluster)
        self._clock = clock

    def options(self) -> list[Option]:
        """What the constructor takes."""
        return list(OPTIONS)

    def close(self) -> None:
        """Close idle connections; see :meth:`BaseExecutor.close`."""
        self._client.close()

    # --- launching ---

    def plan(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any] | None = None,
        *,
        dry_run: Literal["server"] | None = None,
        **options: Any,
    ) -> Plan:
        """The Job that :meth:`launch_replicas` would create; values that are named like secrets are left out.

        Args:
            n_replicas: As for the launch.
            entrypoint: As for the launch.
            entrypoint_args: As for the launch.
            dry_run: ``"server"`` has the cluster check it too, with its admission hooks, quotas aside; nothing is created.
            **options: As for the launch.

        Raises:
            BackendError: The launch would be refused.
        """
        if dry_run not in {None, "server"}:
            raise InvalidRequestError(f"dry_run must be 'server' or None, not {dry_run!r}")
        if dry_run is None:
            return super().plan(n_replicas, entrypoint, entrypoint_args, **options)
        request = self._request(n_replicas, entrypoint, entrypoint_args, **options)
        manifest = job_manifest(request, self._settings)
        self._check_service_account()
        self._patiently(lambda: self._cluster.create_job(manifest, dry_run=True))
        return Plan(request.run_id, (redacted(manifest),))

    def check(
        self,
        n_replicas: int = 1,
        *,
        rendezvous_uri: str | None = None,
        patience: float = 600.0,
        **options: Any,
    ) -> list[Finding]:
        """What stands in the way of a launch; creates nothing, but for one pod where ``rendezvous_uri`` is given.

        Looks at the cluster's address and credentials, our rights, the service account, quotas, and has the cluster
        check the Job (a dry run). Whether replicas can reach their bucket only a replica can find out: one without GPUs is
        started with the run's image, account and environment, tries the bucket, and is removed.

        Args:
            n_replicas: As for the launch.
            rendezvous_uri: Have a pod try this prefix; its image needs ``diloco-core``.
            patience: Seconds that this pod may take, image and node included.
            **options: As for the launch: ``gpu``, ``cpu``, ``memory``, ``spot`` and so on.

        Returns:
            What was found, good and bad; each says what to do.

        Raises:
            InvalidRequestError: The launch itself would be refused.
        """
        manifest = job_manifest(
            self._request(n_replicas, "check:check", None, **options), self._settings
        )
        found = check_cluster(self._cluster, manifest, self._settings.service_account_name)
        if rendezvous_uri is not None and all(finding.ok is not False for finding in found):
            small: dict[str, Any] = {
                name: options[name] for name in ("env", "secrets") if name in options
            }
            found.append(check_rendezvous(self, rendezvous_uri, patience, small))
        return found

    def _plan(self, request: RunRequest) -> list[dict[str, Any]]:
        return [redacted(job_manifest(request, self._settings))]

    def _submit(self, request: RunRequest) -> list[ReplicaHandle]:
        manifest = job_manifest(request, self._settings)
        server = self._client.server
        self._check_service_account()
        try:
            facts = create(self._cluster, manifest, self._backoff, self._patience)
        except UnknownLaunchError as error:
            space, count = self._settings.namespace, len(request.ranks)
            raise LaunchError(
                str(error),
                make_handles(
                    request.run_id, "", request.ranks[0], count, request.world_size, space, server
                ),
            ) from error
        except BackendError:
            raise
        except BaseException as interrupt:
            # A run that the caller has named may be an earlier launch's, whose replicas are not ours to end.
            if request.named or not withdraw(
                self._cluster, manifest, self._backoff, self._patience
            ):
                interrupt.add_note(
                    f"the run {request.run_id!r} may have been created: attach it, or cancel it"
                )
            raise
        return self._handles(facts, server)

    def _check_service_account(self) -> None:
        name, space = self._settings.service_account_name, self._settings.namespace
        if name is None or self._patiently(
            lambda: check_service_account(self._cluster, space, name)
        ):
            return
        import logging  # slow to import

        text = (
            "whether the service account %s/%s exists cannot be checked: reading it is not allowed"
        )
        logging.getLogger("diloco_eks").warning(text, space, name)

    def _handles(self, facts: JobFacts, server: str) -> list[ReplicaHandle]:
        space = self._settings.namespace
        return make_handles(
            facts.run_id,
            facts.uid,
            facts.first_rank,
            facts.completions,
            facts.world_size,
            space,
            server,
        )

    # --- watching ---

    def _observe_run(
        self, handles: Sequence[ReplicaHandle]
    ) -> Mapping[ReplicaHandle, ReplicaStatus]:
        return self._runs.observe(handles)

    def _result(self, handle: ReplicaHandle) -> Any:
        return self._runs.result(handle, lambda: self._source(handle).pods())

    # --- ending and finding ---

    def _stop(self, handle: ReplicaHandle) -> None:
        now = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="seconds")
        self._patiently(lambda: self._runs.cancel(handle, now))

    def _purge(self, handle: ReplicaHandle) -> None:
        self._patiently(lambda: self._runs.purge(handle))

    def _list_runs(self) -> list[str]:
        jobs = self._patiently(
            lambda: self._cluster.list_jobs(
                self._settings.namespace, f"{names.MANAGED_BY}={names.MANAGER},{names.RUN}"
            )
        )
        known = sorted(
            (str(job["metadata"].get("creationTimestamp")), read_job(job).run_id) for job in jobs
        )
        return [run_id for _, run_id in known]

    def _attach(self, run_id: str) -> list[ReplicaHandle]:
        space, server = self._settings.namespace, self._client.server
        facts = self._patiently(lambda: find_job(self._cluster, space, run_id))
        return self._handles(facts, server)

    def _check(self, handle: ReplicaHandle) -> None:
        super()._check(handle)
        check_handle(handle)
