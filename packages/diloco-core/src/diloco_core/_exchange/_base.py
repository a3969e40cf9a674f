"""What an exchange is: the one operation by which replicas come to the same values.

The parameters are cut into shards. The owner of a shard sums everybody's contribution to it in rank order, applies the
update and publishes the new values; everybody adopts them. All replicas read the same bytes, so they agree exactly, also
on different processors. Contributions, updates and adoption go chunk by chunk through small buffers, so that an exchange
needs no memory of the size of the model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from json import dumps
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .._arithmetic._sync_job import SyncJob
    from .._model._unsynced import Unsynced


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one sync did, as seen by one replica.

    Attributes:
        sync: In reports of an outer loop, how many outer steps the run has taken when it is over: 1 for the first one; the
            same as before where none was taken. In reports of an exchange that is used without one, such as those of
            :meth:`ObjectStoreAllReduce.mean`, its number within the exchange: 0 for the first one.
        fragment: Name of what was synced.
        committed: Whether the new values were adopted, also where that took a reload.
        members: How many replicas contributed; 0 where the sync does not count.
        bytes_sent: Bytes of the contribution and of the published state (with the outer state) that this replica wrote.
        bytes_received: Bytes of contributions and published state that this replica read; headers may be left out.
        wait_seconds: Time spent waiting for others.
        exchange_seconds: Time spent in the sync, waiting not counted.
        inner_steps: Inner steps that the own contribution covers (0 where there is no inner loop, and where it was carried or is
            open: the report of the fragment's next sync counts them).
        total_inner_steps: Inner steps since the start of the run.
        contribution: What became of the own contribution: ``counted``, ``carried`` into the next sync of the fragment,
            ``dropped`` (the sync does not hold it, and no later one will), ``open`` where this replica did not wait for the end
            (it may be counted later), or ``none`` where there was none to make. Always ``counted`` in strict runs, but
            ``dropped`` where a manager has voted against the sync (:class:`ManagerExchange`).
        reloaded: Whether this replica had to start again from the published state (elastic runs only). Its own contribution
            may be counted all the same. What it has learned in other fragments since their last syncs is lost; a
            warning in the log says how many inner steps that are.
        batches_to_skip: How many batches the data loader has to pass over now (elastic runs only): with this sync the run
            has counted inner steps that an earlier life of this rank had taken with them. 0 for almost all syncs.
    """

    sync: int
    fragment: str
    committed: bool
    members: int
    bytes_sent: int
    bytes_received: int
    wait_seconds: float
    exchange_seconds: float
    inner_steps: int = 0
    total_inner_steps: int = 0
    contribution: str = "counted"
    reloaded: bool = False
    batches_to_skip: int = 0

    def to_json(self, **extra: Any) -> str:
        """The report and ``extra`` as one line of JSON."""
        return dumps({**asdict(self), **extra})


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

    def join(self, schema: Schema) -> None:
        """Meet the other replicas; returns when all are there and agree. Repeatable with the same schema.

        Raises:
            RendezvousTimeoutError: Some ranks never came; it names them.
            RunExistsError: The prefix was used before.
            MismatchError: The replicas disagree; it says on what.
        """
        ...

    def sync(self, job: SyncJob, *, last: bool = False) -> SyncReport:
        """Contribute, reduce, update, adopt. Returns when this replica has adopted the result.

        An error in the middle leaves the copies of this replica undefined; the published state in the store is whole.

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
        ...

    def shards(self, size: int) -> int:
        """Into how many shards values of ``size`` bytes are cut; the same on every replica.

        Raises:
            ConfigurationError: They are too large for one object.
        """
        ...

    def leave(self) -> None:
        """Tell the others that this replica is done; repeatable."""
        ...

    def abort(self, error: BaseException) -> None:
        """Tell the others that this replica has failed, so that they need not wait; repeatable, never raises."""
        ...
