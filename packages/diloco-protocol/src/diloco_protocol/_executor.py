"""The five verbs, as a structural type: a backend needs no inheritance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ._handle import ReplicaHandle
from ._types import ReplicaResult, ReplicaState


@runtime_checkable
class ServerlessExecutor(Protocol):
    """Launches, watches, cancels and collects replicas.

    ``isinstance`` checks only names, the conformance suite the rest.
    """

    @property
    def backend_name(self) -> str:
        """Name of the backend, as its handles carry it."""
        ...

    @property
    def supports_inter_replica_network(self) -> bool:
        """Whether replicas can reach each other over a network."""
        ...

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float | None = 3600,
    ) -> list[ReplicaHandle]:
        """Start a cohort; handles in rank order."""
        ...

    def poll(self, handle: ReplicaHandle) -> ReplicaState:
        """The state of a replica."""
        ...

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """The last lines of a replica's log; ``""`` when there are none."""
        ...

    def cancel(self, handle: ReplicaHandle) -> None:
        """End a replica (or its whole run, as the backend declares); repeatable."""
        ...

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None
    ) -> list[ReplicaResult]:
        """Wait for replicas; one result per handle, in the given order."""
        ...
