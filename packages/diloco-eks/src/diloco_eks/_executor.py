"""The verbs of an executor, carried out with Indexed Jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any

from diloco_protocol import (
    BackendError,
    Backoff,
    Capabilities,
    Finding,
    InvalidRequestError,
    OutcomeMessage,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaStatus,
    RunRequest,
)
from diloco_protocol.backend import takes

from ._client._client import Client
from ._client._cluster import Cluster
from ._client._errors import warn
from ._client._kubeconfig import namespace_of
from ._request import _names as names
from ._request._manifest import job_manifest
from ._request._options import EKSOptions
from ._state._facts import JobFacts
from ._state._handles import check_handle, handles_of
from ._verbs._check import check_cluster, check_queue, check_service_account
from ._verbs._launch import create, withdraw
from ._verbs._log_verbs import LogVerbs
from ._verbs._runs import Runs, find_job


class EKSExecutor(LogVerbs):
    """Runs replicas as the pods of one Indexed Job per run, on EKS or any Kubernetes from 1.33 on.

    All that is known about a run is in its Job and pods, so any executor in any process can answer
    for any handle. The replicas' image needs ``diloco-protocol``, whose runner the container
    starts. Safe to share between threads.

    ``gpu`` is ``"H100"``, ``"A100:8"``, ``"L40S:4"``, or ``"2"`` for two of any model. ``secrets``
    are ``"name/key"`` of Secrets in the run's namespace. Cancel ends the whole run. The README says
    what the cluster must allow.

    Its arguments are the fields of :class:`EKSOptions`: ``image`` first, the others by name.

    Raises:
        InvalidRequestError: A value is not allowed; the error says what was given and what is
            allowed.
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

    options_class = EKSOptions
    replica_word = "pod"

    _last_look = 5.0  # seconds that the cluster has to answer, however close the deadline is

    @takes(EKSOptions)
    def __init__(self, *arguments: Any, **options: Any) -> None:
        chosen = EKSOptions(*arguments, **options)
        for name in ("core_api",) if chosen.batch_api is None else ("context", "kubeconfig"):
            if getattr(chosen, name) is not None:
                raise InvalidRequestError(
                    f"{name}= has no effect: core_api= is used together with batch_api=, and "
                    "context= and kubeconfig= in the place of both"
                )
        backoff = Backoff(first=1.0, factor=1.5, cap=15.0)
        super().__init__(**chosen.of_base(backoff), max_restarts=chosen.backoff_limit)
        self._given = chosen
        self.capabilities = replace(
            type(self).capabilities,
            retention=chosen.ttl_seconds_after_finished,
            failure_scope="gang" if chosen.on_replica_failure == "fail_run" else "replica",
        )
        self._clock = chosen.clock
        self._client = Client(chosen)
        self._cluster = Cluster(self._client)
        self._runs = Runs(self._cluster, chosen.clock)

    @cached_property
    def _options(self) -> EKSOptions:
        """Return the options, with the namespace, for which the kubeconfig has to be read."""
        options = self._given
        if options.namespace is not None:
            return options
        own_client = options.batch_api is None
        space = namespace_of(options.kubeconfig, options.context) if own_client else names.DEFAULT
        return replace(options, namespace=space)

    @property
    def _namespace(self) -> str:
        return self._options.namespace or names.DEFAULT

    def close(self) -> None:
        """Close idle connections; see :meth:`BaseExecutor.close`."""
        self._client.close()

    # --- launching ---

    def _findings(self, request: RunRequest) -> list[Finding]:
        options = self._options
        return check_cluster(
            self._cluster, job_manifest(request, options), options.service_account_name,
            self._patiently, restricted=options.restricted,
        )  # fmt: skip

    def _plan(self, request: RunRequest) -> list[dict[str, Any]]:
        return [job_manifest(request, self._options, shown=True)]

    def _where(self) -> str:
        return self._namespace

    def _submit(self, request: RunRequest) -> list[ReplicaHandle]:
        manifest = job_manifest(request, self._options)
        self._check_names()
        try:
            return self._handles(create(self._cluster, manifest, self._patiently))
        except BackendError:
            raise
        except BaseException as interrupt:
            # A run that the caller has named may belong to an earlier launch, whose replicas this
            # launch may not end.
            if not request.named:
                withdraw(self._cluster, manifest, self._patiently)
            # If no Job was found, the create may still be under way.
            interrupt.add_note(
                f"the run {request.run_id!r} may have been created, or may be yet: attach it, or "
                "cancel it"
            )
            raise

    def _check_names(self) -> None:
        """Refuse a service account or a queue that does not exist, before the launch."""
        options, space = self._options, self._namespace
        for what, name, check in (
            ("service account", options.service_account_name, check_service_account),
            ("queue", options.queue, check_queue),
        ):
            if name is None or self._patiently(partial(check, self._cluster, space, name)):
                continue
            warn(
                f"whether the {what} {space}/{name} exists cannot be checked: reading it is not "
                "allowed"
            )

    def _handles(self, facts: JobFacts) -> list[ReplicaHandle]:
        return handles_of(facts, self._namespace, self._client.server)

    # --- watching ---

    def _within(self, seconds: float | None) -> AbstractContextManager[object]:
        """Limit the wait for answers of the cluster to the given time and at most 5 s more."""
        if seconds is None:
            return nullcontext()
        clock = self._backoff.clock
        return self._client.until(clock() + seconds, clock, self._last_look)

    def _observe_run(
        self, handles: Sequence[ReplicaHandle]
    ) -> Mapping[ReplicaHandle, ReplicaStatus]:
        return self._runs.observe(handles)

    def _is_ours(self, handle: ReplicaHandle) -> bool:
        executor_place = self._client.server, self._namespace
        place = handle.metadata
        return super()._is_ours(handle) and (place["server"], place["namespace"]) == executor_place

    def _observe(self, handles: Sequence[ReplicaHandle]) -> Mapping[ReplicaHandle, ReplicaStatus]:
        server = self._client.server
        near = [handle for handle in handles if handle.metadata["server"] == server]
        # The same cluster may have another address, so such handles are looked up too, but without
        # the journal.
        far = [handle for handle in handles if handle.metadata["server"] != server]
        if not far:
            return super()._observe(near)
        return {**(super()._observe(near) if near else {}), **self._observe_run(far)}

    def _ends(self, handles: Sequence[ReplicaHandle]) -> dict[ReplicaHandle, ReplicaStatus]:
        server = self._client.server
        return super()._ends([handle for handle in handles if handle.metadata["server"] == server])

    def _result(self, handle: ReplicaHandle) -> Any:
        now, patience = self._backoff.clock(), self._patience
        return self._runs.result(handle, lambda: self._source(handle).pods(), now, patience)

    # --- ending and finding ---

    def _stop(self, handle: ReplicaHandle) -> None:
        now = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="seconds")
        self._patiently(lambda: self._runs.cancel(handle, now))

    def _purge(self, handle: ReplicaHandle) -> None:
        self._runs.purge(handle)

    def _place(self, handle: ReplicaHandle) -> tuple[str, ...]:
        return tuple(handle.metadata[key] for key in ("server", "namespace", "job_uid"))

    def _spelled(
        self, handle: ReplicaHandle, known: Sequence[ReplicaHandle]
    ) -> list[ReplicaHandle]:
        try:
            facts = self._runs.job(handle)
        except ReplicaNotFoundError:
            return []
        return [
            peer
            for peer in known
            if peer.metadata["job_uid"] == facts.uid
            or (not peer.metadata["job_uid"] and peer.metadata["fingerprint"] == facts.fingerprint)
        ]

    def _siblings(self, handle: ReplicaHandle) -> list[ReplicaHandle]:
        try:
            facts = self._runs.job(handle)
        except ReplicaNotFoundError:
            return [handle]
        return [replace(handle, rank=rank) for rank in facts.ranks]

    def _rendezvous(self, handle: ReplicaHandle) -> str | None:
        return self._runs.rendezvous(handle)

    def _list_runs(self) -> list[str]:
        selector = f"{names.MANAGED_BY}={names.MANAGER},{names.RUN}"
        return self._cluster.list_runs(self._namespace, selector)

    def _attach(self, run_id: str) -> list[ReplicaHandle]:
        return self._handles(find_job(self._cluster, self._namespace, run_id))

    def _check_handle(self, handle: ReplicaHandle) -> None:
        check_handle(handle, [self._namespace, *self._given.other_namespaces])
