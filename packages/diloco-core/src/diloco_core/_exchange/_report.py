"""What an exchange, and an outer loop above it, tell of a sync."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from json import dumps
from typing import Any


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
