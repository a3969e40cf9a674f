"""What exchanges without a store have in common: they hold everything in memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from .._arithmetic._clip import Clipping, measure_norms
from .._arithmetic._contribution import Contribution, shares
from .._arithmetic._rate import chosen
from .._arithmetic._sharded import Scratch, Source, check_contribution
from .._arithmetic._sync_job import SyncJob
from .._checks import whole
from .._errors import ConfigurationError, MismatchError, SyncError
from .._timing import Timing, limits_given
from ._base import Exchange, Schema
from ._endings import Progress
from ._pending import Guard, Pending, Steps, Syncs
from ._report import SyncReport
from ._schemas import compare_schemas


class ExchangeInMemory(Exchange):
    """An exchange without a store; see :class:`._base.Exchange`.

    Args:
        rank: The rank of this replica.
        world_size: The number of ranks.
        timing: Limits and clock.
        chunk_bytes: Number of bytes handled at once.

    Raises:
        ConfigurationError: A limit is given that has no effect here, or ``chunk_bytes`` is not a
            whole number of at least 1.
    """

    _limits: tuple[str, ...] = ()  # those that it asks for

    def __init__(self, rank: int, world_size: int, timing: Timing, chunk_bytes: int) -> None:
        for name in sorted(limits_given(timing).keys() - self._limits):
            raise ConfigurationError(
                f"timing has a {name}, which has no effect in {type(self).__name__}: leave it out"
            )
        self.rank = rank
        self.world_size = world_size
        self._timing = timing
        self._chunk_bytes = whole("chunk_bytes", chunk_bytes)
        self._scratch = Scratch(self._chunk_bytes)
        self._schema: Schema | None = None
        self._progress = Progress()
        self._syncs = Syncs()
        self._ended = False
        self._shares: tuple[float, ...] = ()
        self._clipping: Clipping | None = None

    def join(self, schema: Schema) -> None:
        """Compare schemas with all others; see :meth:`._base.Exchange.join`."""
        if self._schema is None:
            own, schemas = self._schemas(schema)
            for rank, other in enumerate(schemas):
                compare_schemas(f"rank {self.rank}", own, f"rank {rank}", other)
            self._schema = schema
        elif schema != self._schema:
            raise ConfigurationError(
                "this exchange has already joined with another model or other settings: make "
                "another exchange for another outer loop"
            )

    @abstractmethod
    def _schemas(self, schema: Schema) -> tuple[Schema, Iterable[Schema]]:
        """Return what is compared: this replica's schema, and those of all ranks in order."""

    def shards(self, size: int) -> int:  # noqa: ARG002 - the signature of Exchange
        """The number of shards: one per replica."""
        return self.world_size

    def _begun(self, job: SyncJob, guard: Guard) -> Pending:
        """Run the first half of a sync; see :meth:`.Syncs.begin`.

        Raises:
            SyncError: This exchange has not joined its run yet, or has ended.
        """
        if self._ended:
            raise SyncError(
                "this exchange has ended: its replica has left or failed. Make another exchange "
                "for another run."
            )
        if self._schema is None:
            raise SyncError(
                "this exchange has not joined its run yet: call join() before the first sync"
            )
        return self._syncs.begin(job.name, self._sync(job), guard)

    @abstractmethod
    def _sync(self, job: SyncJob) -> Steps:
        """Carry out a sync; yields once, between its halves."""

    def _prepare(self, job: SyncJob) -> None:
        """Check what this replica contributes, and measure it."""
        for shard in range(job.layout.shards):
            check_contribution(job, shard, self.rank, self._chunk_bytes, self._scratch)
        measure_norms(job, self.rank, self._scratch)

    def _settle(
        self, job: SyncJob, fingerprints: Iterable[str], contributions: Sequence[Contribution]
    ) -> None:
        """Conclude from the contributions of all ranks how much each counts, and the learning rate.

        Raises:
            MismatchError: A rank contributes other tensors.
        """
        for rank, fingerprint in enumerate(fingerprints):
            if fingerprint != job.fingerprint:
                raise MismatchError(
                    f"in {self._describe(job)}, rank {rank} contributes other tensors than rank "
                    f"{self.rank}: all replicas must sync the same tensors, with the same shapes "
                    "and dtypes, in the same order"
                )
        self._shares = shares(job.terms.weighting, [each.amount for each in contributions])
        norms = [each.norms for each in contributions]
        self._clipping = Clipping(job, norms) if job.terms.clip else None
        job.rate = chosen(each.proposal.rate(rank) for rank, each in enumerate(contributions))

    def _clipped(self, sources: list[Source]) -> list[Source]:
        if self._clipping is None:
            return sources
        return [self._clipping.clipped(rank, each) for rank, each in enumerate(sources)]

    def _finished(
        self, job: SyncJob, *, sent: int, received: int, waited: float, since: float
    ) -> SyncReport:
        """Count the sync, and report it."""
        number, self._progress = self._progress.number, self._progress.plus(job.kind)
        return SyncReport(
            sync=number,
            fragment=job.name,
            committed=True,
            members=self.world_size,
            bytes_sent=sent,
            bytes_received=received,
            wait_seconds=waited,
            exchange_seconds=self._timing.clock() - since - waited,
            weights=self._shares,
            clipped=() if self._clipping is None else self._clipping.report(),
        )

    def _describe(self, job: SyncJob) -> str:
        """Return what messages call the next sync; its number is counted from 1."""
        if job.kind == "initial":
            return f"the exchange of the initial values of fragment {job.name}"
        number = self._progress.next
        return f"mean {number}" if job.kind == "mean" else f"sync {number} (fragment {job.name})"
