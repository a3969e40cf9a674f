"""The report of an exchange, or of an outer loop above it, about one sync."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from json import dumps
from typing import Any

from .._arithmetic._clip import Clipped


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one sync did, as seen by one replica.

    Attributes:
        sync: In reports of an outer loop, the number of outer steps that the run has taken after
            this sync: 1 for the first sync; the same as before if this sync took none. In reports
            of an exchange that is used without an outer loop, such as those of
            :meth:`ObjectStoreAllReduce.mean`, the number of the sync within the exchange, from 0.
        fragment: Name of what was synced.
        committed: Whether the new values were adopted, including by a reload.
        members: How many replicas contributed; 0 if the sync does not count.
        bytes_sent: Bytes of the contribution and of the published state (with the outer state) that
            this replica wrote.
        bytes_received: Bytes of contributions and published state that this replica read; headers
            may be left out.
        wait_seconds: Time of the sync spent waiting for others; with a ``delay``, beside the
            training for the most part.
        exchange_seconds: Time spent in the sync, likewise, not counting the time spent waiting.
        compute_seconds: Time in which this replica trained since the sync before this one; 0
            without an inner loop, as are the following two.
        hidden_seconds: The part of the sync's time in which this replica trained on (``delay``).
        exposed_seconds: Time in which this replica did not train because of the sync: while it took
            what it sends, waited for the result, and adopted it. The share of a replica's time that
            goes into training is ``compute_seconds / (compute_seconds + exposed_seconds)``.
        inner_steps: Inner steps that this replica's contribution covers. It is 0 without an inner
            loop, and if the contribution was carried or is open: then the report of the fragment's
            next sync counts these steps.
        total_inner_steps: Inner steps since the start of the run.
        outer_lr: The learning rate of the outer step; one for each parameter group if the outer
            optimizer has several. None without an outer step, or if the outer optimizer has none.
        contribution: What became of this replica's contribution: ``counted``; ``carried`` into the
            next sync of the fragment; ``dropped`` (neither this sync nor a later one holds it);
            ``open`` if this replica did not wait for the end (it may be counted later); or ``none``
            if there was nothing to contribute. In fixed runs it is always ``counted``, except that
            it is ``dropped`` if a manager has voted against the sync (:class:`ManagerExchange`).
        reloaded: Whether this replica had to start again from the published state (elastic runs
            only). Its contribution may still be counted. Its progress in other fragments since
            their last syncs is lost; a warning in the log gives the number of inner steps.
        weights: The share of each member's contribution in their sum, in rank order; they add up to
            1. Empty if all count the same, and if the sync does not count.
        clipped: With ``clip="median"``: for each member, in rank order, how far its contribution
            was scaled down. Empty on a replica of an elastic run that has updated no shard in this
            sync.
        batches_to_skip: How many batches the data loader has to skip now (elastic runs only): with
            this sync the run has counted inner steps that an earlier incarnation of this rank took
            with these batches. 0 for almost all syncs.
    """

    sync: int
    fragment: str
    committed: bool
    members: int
    bytes_sent: int
    bytes_received: int
    wait_seconds: float
    exchange_seconds: float
    compute_seconds: float = 0.0
    hidden_seconds: float = 0.0
    exposed_seconds: float = 0.0
    inner_steps: int = 0
    total_inner_steps: int = 0
    outer_lr: float | tuple[float, ...] | None = None
    contribution: str = "counted"
    reloaded: bool = False
    batches_to_skip: int = 0
    weights: tuple[float, ...] = ()
    clipped: tuple[Clipped, ...] = ()

    def to_json(self, **extra: Any) -> str:
        """The report and ``extra`` as one line of JSON."""
        return dumps({**asdict(self), **extra})
