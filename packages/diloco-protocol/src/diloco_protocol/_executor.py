"""The five verbs as a structural type, so that a backend needs no inheritance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ._handle import ReplicaHandle
from ._types import ReplicaResult, ReplicaState


@runtime_checkable
class ServerlessExecutor(Protocol):
    """Launches, watches, cancels and collects replicas.

    ``isinstance`` checks only the names; the conformance suite checks the rest.
    """

    @property
    def backend_name(self) -> str:
        """Return the name of the backend, as its handles carry it."""
        ...

    @property
    def supports_inter_replica_network(self) -> bool:
        """Return whether replicas can reach each other over a network."""
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
        """Start a cohort, and return its handles in rank order."""
        ...

    def poll(self, handle: ReplicaHandle) -> ReplicaState:
        """Return the state of a replica."""
        ...

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """Return the last lines of a replica's log; ``""`` if there are none."""
        ...

    def cancel(self, handle: ReplicaHandle) -> None:
        """End a replica (or its whole run, as the backend declares); repeatable."""
        ...

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None
    ) -> list[ReplicaResult]:
        """Wait for replicas, and return one result per handle, in the given order."""
        ...
