"""What runs the pods, as the cluster sees it."""

from __future__ import annotations

from typing import Any, Protocol

Json = dict[str, Any]


class Log(Protocol):
    """The output of one life of one container; read under the cluster's lock."""

    ended: bool

    def times(self) -> list[float]:
        """When each line came."""

    def lines(self, start: int) -> list[tuple[float, bytes]]:
        """(time, line with its newline) from the ``start``-th on."""


class Runtime(Protocol):
    """Whatever runs the pods: the script of a test, or real processes. Called under the cluster's lock."""

    def added(self, pod: Json) -> None:
        """A pod was made."""

    def deleting(self, pod: Json) -> None:
        """A pod on a node was told to go; end its containers, then call ``Cluster.gone``."""

    def removed(self, pod: Json) -> None:
        """A pod is out of the store."""

    def log_of(self, pod: Json, container: str, life: int) -> Log:
        """The log of one life of a container, its restart count being ``life``."""
