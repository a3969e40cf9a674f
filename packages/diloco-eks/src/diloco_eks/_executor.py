"""The verbs, on Indexed Jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Literal

from diloco_protocol import (
    BackendError,
    Backoff,
    Capabilities,
    Finding,
    InvalidRequestError,
    LaunchError,
    Option,
    OutcomeMessage,
    Plan,
    ReplicaHandle,
    ReplicaStatus,
    RunRequest,
)
from diloco_protocol.backend import options_of, takes

from . import _names as names
from ._check import check_cluster, check_rendezvous
from ._client import Client
from ._cluster import Cluster
from ._facts import JobFacts, read_job
from ._handles import check_handle, find_job, make_handles
from ._launch import UnknownLaunchError, check_service_account, create, withdraw
from ._log_verbs import LogVerbs
from ._manifest import job_manifest, redacted
from ._options import EKSOptions
from ._runs import Runs


class EKSExecutor(LogVerbs):
    """Runs replicas as the pods of one Indexed Job per run, on EKS or any Kubernetes from 1.33 on.

    All that is known about a run is in its Job and pods, so any executor in any process answers for any handle. The
    replicas' image needs ``diloco-protocol``, whose runner is what the container starts. Safe to share between threads.

    ``gpu``: ``"H100"``, ``"A100:8"``, ``"L40S:4"``, or ``"2"`` for two of any model. ``secrets``: ``"name/key"`` of
    Secrets in the run's namespace. Cancel ends the whole run. See the README for what the cluster must allow.

    Its arguments are the fields of :class:`EKSOptions`: ``image`` first, the others by name.

    Raises:
        InvalidRequestError: A value is not allowed; says what was given and what is allowed.
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

    @takes(EKSOptions)
    def __init__(self, *arguments: Any, **options: Any) -> None:
        chosen = EKSOptions(*arguments, **options)
        super().__init__(
            run_id=chosen.run_id,
            journal=chosen.journal,
            backoff=chosen.backoff or Backoff(first=1.0, factor=1.5, cap=15.0),
            env=chosen.env,
            max_restarts=chosen.backoff_limit,
        )
        self._options = chosen
        self.capabilities = replace(
            type(self).capabilities,
            retention=chosen.ttl_seconds_after_finished,
            failure_scope="gang" if chosen.on_replica_failure == "fail_run" else "replica",
        )
        self._patience = chosen.retry_timeout
        self._clock = chosen.clock
        self._client = Client(
            context=chosen.context,
            kubeconfig=chosen.kubeconfig,
            batch_api=chosen.batch_api,
            core_api=chosen.core_api,
            request_timeout=chosen.request_timeout or 0.001,
        )
        self._cluster = Cluster(self._client)
        self._runs = Runs(self._client, self._cluster)

    def options(self) -> list[Option]:
        """What the constructor takes."""
        return options_of(EKSOptions)

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
        manifest = job_manifest(request, self._options)
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
            What was found, good and bad; each says what to do. The subjects are ``"cluster"``, ``"rights"``,
            ``"service account"``, ``"manifest"``, ``"quota"`` and ``"rendezvous"``.

        Raises:
            InvalidRequestError: The launch itself would be refused.
        """
        findings = super().check(n_replicas, **options)
        if rendezvous_uri is not None and all(finding.ok is not False for finding in findings):
            small: dict[str, Any] = {
                name: options[name] for name in ("env", "secrets") if name in options
            }
            findings.append(check_rendezvous(self, rendezvous_uri, patience, small))
        return findings

    def _findings(self, request: RunRequest) -> list[Finding]:
        manifest = job_manifest(request, self._options)
        return check_cluster(self._cluster, manifest, self._options.service_account_name)

    def _plan(self, request: RunRequest) -> list[dict[str, Any]]:
        return [redacted(job_manifest(request, self._options))]

    def _submit(self, request: RunRequest) -> list[ReplicaHandle]:
        manifest = job_manifest(request, self._options)
        server = self._client.server
        self._check_service_account()
        try:
            facts = create(self._cluster, manifest, self._backoff, self._patience)
        except UnknownLaunchError as error:
            space, count = self._options.namespace, len(request.ranks)
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
        name, space = self._options.service_account_name, self._options.namespace
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
        space = self._options.namespace
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
                self._options.namespace, f"{names.MANAGED_BY}={names.MANAGER},{names.RUN}"
            )
        )
        known = sorted(
            (str(job["metadata"].get("creationTimestamp")), read_job(job).run_id) for job in jobs
        )
        return [run_id for _, run_id in known]

    def _attach(self, run_id: str) -> list[ReplicaHandle]:
        space, server = self._options.namespace, self._client.server
        facts = self._patiently(lambda: find_job(self._cluster, space, run_id))
        return self._handles(facts, server)

    def _check(self, handle: ReplicaHandle) -> None:
        super()._check(handle)
        check_handle(handle)
