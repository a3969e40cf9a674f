"""What runs the pods, as the cluster sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Json = dict[str, Any]

ENTRY_BYTES = 16384  # of a log, at most; the default of containerd, and seen


class Log(Protocol):
    """The output of one life of one container, in the entries of a container runtime; read under the cluster's lock.

    An entry is a line with its newline, without a carriage return before it. Of a line longer than
    ``ENTRY_BYTES``, every entry but the last is a part without a newline.
    """

    ended: bool

    def times(self) -> list[float]:
        """When each entry came."""

    def entries(self, start: int, end: int) -> list[tuple[float, bytes]]:
        """Return (time, text) of those from ``start`` up to ``end``."""


class Runtime(Protocol):
    """Whatever runs the pods: the script of a test, or real processes.

    Called under the cluster's lock.
    """

    def added(self, pod: Json) -> None:
        """A pod was made."""

    def deleting(self, pod: Json) -> None:
        """A pod on a node was told to go; end its containers, then call ``Cluster.gone``."""

    def removed(self, pod: Json) -> None:
        """A pod is out of the store."""

    def found(self, node: str) -> None:
        """A node that was lost answers again: tell what became of its pods, and end those that were told to go."""

    def log_of(self, pod: Json, container: str, life: int) -> Log:
        """The log of one life of a container, its restart count being ``life``."""

    def execute(
        self,
        pod: Json,
        container: str,
        command: Sequence[str],
        streams: Sequence[int],
        told: Callable[[Json], None],
    ) -> Callable[[], None] | None:
        """Start a command in a container, as ``exec`` does.

        Args:
            pod: as stored.
            container: its name.
            command: program and arguments.
            streams: descriptors for stdin, stdout and stderr.
            told: called once, from any thread and without the lock, with
                ``{"event": "ended", "code": ...}`` or ``{"event": "refused", "message": ...}``.

        Returns:
            What kills it; None if the container does not run.

        Raises:
            ApiError: there are no processes.
        """
