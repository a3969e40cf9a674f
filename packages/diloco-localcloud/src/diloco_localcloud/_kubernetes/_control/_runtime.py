"""The logs of containers, and the interface to the part that runs the pods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Json = dict[str, Any]

ENTRY_BYTES = 16384  # the most in one entry of a log; containerd's default, which was also seen


class Log:
    """The output of one container, in the entries of a container runtime; kept in memory.

    Read under the cluster's lock. An entry is a line with its newline, without a carriage return
    before it. A line longer than ``ENTRY_BYTES`` is split: each of its entries but the last has no
    newline.
    """

    def __init__(self) -> None:
        self.ended = False
        self._entries: list[tuple[float, bytes]] = []

    def write(self, moment: float, text: str | bytes) -> None:
        """Add text; an unfinished line is shown at once, and grows."""
        data = text.encode() if isinstance(text, str) else text
        # Only at newlines, as in the container runtime: a carriage return does not end a line.
        *whole, begin = data.split(b"\n")
        for line in [*(part + b"\n" for part in whole), *([begin] if begin else [])]:
            since, begun = moment, b""
            if self._entries and not self._entries[-1][1].endswith(b"\n"):
                since, begun = self._entries.pop()
            rest = begun + line
            if rest.endswith(b"\r\n"):
                rest = rest[:-2] + b"\n"
            while len(rest.removesuffix(b"\n")) > ENTRY_BYTES:
                self._entries.append((since, rest[:ENTRY_BYTES]))
                since, rest = moment, rest[ENTRY_BYTES:]
            self._entries.append((since, rest))

    def times(self) -> list[float]:
        """Return the time at which each entry came."""
        return [moment for moment, _ in self._entries]

    def entries(self, start: int, end: int) -> list[tuple[float, bytes]]:
        """Return (time, text) of the entries from ``start`` up to ``end``."""
        return self._entries[start:end]


class Runtime(Protocol):
    """The part that runs the pods: the script of a test, or real processes.

    Called under the cluster's lock.
    """

    def added(self, pod: Json) -> None:
        """Take note of a new pod."""

    def deleting(self, pod: Json) -> None:
        """End the containers of a pod that was deleted, then call ``Cluster.gone``."""

    def removed(self, pod: Json) -> None:
        """Take note that a pod is out of the store."""

    def log_of(self, pod: Json, container: str) -> Log:
        """Return the log of a container."""

    def execute(
        self,
        pod: Json,
        container: str,
        command: Sequence[str],
        streams: Sequence[int],
        tell: Callable[[Json], None],
    ) -> Callable[[], None] | None:
        """Start a command in a container, as ``exec`` does.

        Args:
            pod: the pod as stored.
            container: its name.
            command: program and arguments.
            streams: descriptors for stdin, stdout and stderr.
            tell: called once, from any thread and without the lock, with
                ``{"event": "ended", "code": ...}`` or ``{"event": "refused", "message": ...}``.

        Returns:
            A function that kills the command; None if the container does not run.

        Raises:
            ApiError: there are no processes.
        """
