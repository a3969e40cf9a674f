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
    from collections.abc import Collection, Mapping, Sequence

    import torch

    from ._layout import Layout, Piece
    from ._unsynced import Unsynced

CHUNK_BYTES = 2**20
"""Default size of a chunk in bytes: what fits into a processor's second-level cache, measured best at 256 KiB to 1 MiB."""


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


class SyncJob(Protocol):
    """One replica's side of one sync. Tensors are flat, contiguous, on the CPU and in their group's dtype."""

    @property
    def name(self) -> str:
        """Name of what is synced."""
        ...

    @property
    def kind(self) -> str:
        """``initial`` (rank 0's values), ``outer`` (an outer step) or ``mean``."""
        ...

    @property
    def layout(self) -> Layout:
        """How the values are cut."""
        ...

    @property
    def fingerprint(self) -> str:
        """Digest of everything that replicas must agree on; equal for equal schemas."""
        ...

    @property
    def supersedes(self) -> Sequence[int]:
        """Earlier syncs whose published state is of no use once this one is complete."""
        ...

    def contribution(self, piece: Piece, out: torch.Tensor) -> torch.Tensor:
        """This replica's contribution: written into ``out``, or a view that is left alone until the piece is updated."""
        ...

    def unchanged(self) -> Collection[int]:
        """Groups whose contribution is the global copy that all replicas hold, so that nobody has to send it."""
        ...

    def locate(self, piece: Piece, index: int) -> str:
        """Name of the tensor that holds element ``index`` of the piece."""
        ...

    def must_be_finite(self, piece: Piece) -> bool:
        """Whether contributions to the piece, and their mean, may hold neither NaN nor infinity."""
        ...

    def update(self, piece: Piece, reduced: torch.Tensor) -> torch.Tensor:
        """Apply the reduced contributions to the own copy and return the new values (a view, or ``reduced`` itself)."""
        ...

    def check_update(self, piece: Piece, values: torch.Tensor, sync: int) -> None:
        """Refuse new values that the model cannot hold.

        Raises:
            NonFiniteUpdateError: They are NaN or infinite in the dtype of a tensor of the model.
        """
        ...

    def destination(self, piece: Piece) -> torch.Tensor | None:
        """Where published values of this piece are to be read to, or None where a buffer will do."""
        ...

    def adopt(self, piece: Piece, values: torch.Tensor) -> None:
        """Take over published values (``values`` is ``destination(piece)`` where there is one)."""
        ...

    def published(self, piece: Piece) -> torch.Tensor:
        """The values of a piece of an own shard after its update."""
        ...

    def outer_scalars(self, piece: Piece) -> Mapping[str, float]:
        """The outer optimizer's scalars (a step count, say), equal for all elements of the own shards."""
        ...

    def outer_state(self, piece: Piece) -> Mapping[str, torch.Tensor]:
        """The outer optimizer's tensors that belong to a piece of an own shard, each of the piece's size."""
        ...


@dataclass(frozen=True, slots=True)
class Schema:
    """What all replicas must have in common.

    Attributes:
        tensors: A line per tensor: name, then shape, dtype and whatever else must agree.
        settings: Settings of the outer loop.
        fragments: What the files of every fragment hold, for those who read them without a replica; it follows from the
            rest, and is not compared.
        unsynced: What belongs to the model and is not synced; whoever begins the run stores it. Not compared.
    """

    tensors: Mapping[str, str]
    settings: Mapping[str, str]
    fragments: Sequence[Mapping[str, Any]] = ()
    unsynced: Unsynced | None = field(default=None, compare=False)


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
