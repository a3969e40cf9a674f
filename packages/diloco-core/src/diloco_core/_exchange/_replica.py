"""The connection of a replica that is several processes, as each of them has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from .._arithmetic._sync_job import SyncJob
from .._errors import ConfigurationError
from ._base import Exchange, Schema
from ._pending import Pending


class ReplicaExchange(Exchange):
    """What :func:`.connect` returns in a process that is one of several of a replica.

    :class:`.DiLoCo` takes it on every process of the replica. Process 0 is the leader, which alone
    talks to the store; nothing is opened before the outer loop is made.

    Args:
        rank: The rank of the replica.
        world_size: The number of replicas.
        process: The number of this process in the replica, from 0.
        processes: How many there are.
        opened: Opens the connection to the store.
        settings: What was passed to :func:`.connect`, which all of these processes pass alike.
        patience: Seconds for which the others wait for the leader.
        group: The group of these processes; None for torch's default one.

    Attributes:
        when_ended: Called when this process has left or failed.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        process: int,
        processes: int,
        opened: Callable[[], Exchange],
        settings: Mapping[str, Any],
        patience: float,
        group: object = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.process, self.processes = process, processes
        self.patience, self.group = patience, group
        self.settings = settings
        self.when_ended: Callable[[], object] = bool
        self.ended = self.left = False
        self._opened = opened
        self._leads: Exchange | None = None

    def open(self) -> Exchange:
        """Return the connection to the store; called by the leader alone."""
        if self._leads is None:
            self._leads = self._opened()
        return self._leads

    def leave(self) -> None:
        """Tell the other replicas that this one is done, if this process leads; repeatable."""
        if self._leads is not None:
            self._leads.leave()
        self.left |= not self.ended
        self._end()

    def abort(self, error: BaseException) -> None:
        """Tell the other replicas that this one has failed, if this process leads; repeatable."""
        if self._leads is not None:
            self._leads.abort(error)
        self._end()

    def join(self, schema: Schema) -> None:  # noqa: ARG002
        """Refuse: only :class:`.DiLoCo` works over several processes."""
        self._refuse()

    def begin(self, job: SyncJob, *, last: bool = False) -> Pending:  # noqa: ARG002
        """Refuse: only :class:`.DiLoCo` works over several processes."""
        self._refuse()

    def shards(self, size: int) -> int:  # noqa: ARG002
        """Refuse: only :class:`.DiLoCo` works over several processes."""
        self._refuse()

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self.when_ended()

    def _refuse(self) -> NoReturn:
        raise ConfigurationError(
            f"this process is number {self.process} of {self.processes} that are one replica, and "
            "only DiLoCo(...) works over several processes. Elsewhere, say which replica this "
            "process alone is: pass rank= and world_size="
        )
