"""What an exchange is: the one operation by which replicas come to the same values.

The parameters are cut into shards. The owner of a shard sums everybody's contribution to it in rank order, applies the
update and publishes the new values; everybody adopts them. All replicas read the same bytes, so they agree exactly, also
on different processors. Contributions, updates and adoption go chunk by chunk through small buffers, so that an exchange
needs no memory of the size of the model.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .._arithmetic._sync_job import SyncJob
    from .._model._unsynced import Unsynced
    from ._pending import Pending
    from ._report import SyncReport


@dataclass(frozen=True, slots=True)
class Schema:
    """What all replicas must have in common.

    Attributes:
        tensors: A line per tensor: name, then shape, dtype and whatever else must agree.
        settings: Settings of the outer loop.
        fragments: What the files of every fragment hold, for those who read them without a replica; it follows from the
            rest, and is not compared.
        unsynced: What belongs to the model and is not synced; whoever begins the run stores it. Not compared.
        outer_state: Tells how many tensors the outer optimizer keeps of every parameter, for plans. Not compared.
    """

    tensors: Mapping[str, str]
    settings: Mapping[str, str]
    fragments: Sequence[Mapping[str, Any]] = ()
    unsynced: Unsynced | None = field(default=None, compare=False)
    outer_state: Callable[[], float] = field(default=lambda: 1.0, compare=False)


class Exchange(Protocol):
    """One replica's connection to the others. Used from one thread at a time."""

    rank: int
    world_size: int

    @abstractmethod
    def join(self, schema: Schema) -> None:
        """Meet the other replicas; returns when all are there and agree. Repeatable with the same schema.

        Raises:
            RendezvousTimeoutError: Some ranks never came; it names them.
            RunExistsError: The prefix was used before.
            MismatchError: The replicas disagree; it says on what.
        """
        ...

    @abstractmethod
    def begin(self, job: SyncJob, *, last: bool = False) -> Pending:
        """Contribute, as far as that takes no waiting; ``finish()`` of what it returns does the rest of :meth:`sync`.

        One sync is under way at a time. What an error means, and the arguments, are those of :meth:`sync`.
        """
        ...

    def sync(self, job: SyncJob, *, last: bool = False) -> SyncReport:
        """Contribute, reduce, update, adopt. Returns when this replica has adopted the result.

        It is :meth:`begin` and ``finish()``, and is inherited by exchanges that derive from this class. An error in the
        middle leaves the copies of this replica undefined; the published state in the store is whole.

        Args:
            job: What is synced.
            last: This replica can do without it. In strict runs, UnequalSyncsError is no failure of this replica then: its
                copies are as they were, and it may leave.

        Raises:
            NonFiniteDeltaError: The own contribution holds NaN or infinity; nothing was sent.
            NonFiniteUpdateError: The new values would be NaN or infinite; they are not published.
            SyncTimeoutError: Others did not contribute in time; it names them.
            ReplicaLostError: Another replica died or failed.
            UnequalSyncsError: Another replica finished after fewer syncs.
            CorruptedObjectError: Something read back is not what was written.
        """
        return self.begin(job, last=last).finish()

    @abstractmethod
    def shards(self, size: int) -> int:
        """Into how many shards values of ``size`` bytes are cut; the same on every replica.

        Raises:
            ConfigurationError: They are too large for one object.
        """
        ...

    @abstractmethod
    def leave(self) -> None:
        """Tell the others that this replica is done; repeatable."""
        ...

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Tell the others that this replica has failed, so that they need not wait; repeatable, never raises."""
        ...
