"""The exchange over an object store with fixed membership: all ranks are in every sync."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from .._arithmetic._layout import CHUNK_BYTES
from .._checks import check_identity, check_resume
from .._errors import ConfigurationError
from .._timing import Timing
from ._exchange import ElasticExchange
from ._settings import Fixed

if TYPE_CHECKING:
    from .._arithmetic._sync_job import SyncJob
    from .._exchange._base import Schema
    from .._exchange._pending import Pending
    from .._exchange._resumable import ResumableJob
    from .._store._api import Store


class FixedExchange(ElasticExchange):
    """One replica's connection to a run in which all ranks are in every sync."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        run_id: str = "",
        timing: Timing | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        resume: bool | Literal["newest-whole"] = False,
    ) -> None:
        check_resume(resume)
        rank, world_size = check_identity(rank, world_size)
        if not isinstance(run_id, str):
            raise ConfigurationError(
                f"run_id must be text (a str), not {run_id!r} ({type(run_id).__name__})"
            )
        timing = timing or Timing()
        super().__init__(
            store,
            rank,
            world_size,
            Fixed(world_size, timing.lost_after, resume),
            run_id=run_id,
            timing=timing,
            chunk_bytes=chunk_bytes,
        )

    def join(self, schema: Schema) -> None:
        """Set what the replicas must have in common; repeatable with the same schema.

        They meet in :meth:`restore`, or before the first of plain means.
        """
        if self._schema is not None and schema == self._schema:
            return
        if schema.settings.get("operation") and self.resumes:
            raise ConfigurationError(
                "resume= cannot be used for means, which have no state to go on with: leave it out, and use another prefix"
            )
        super().join(schema)

    def begin(self, job: SyncJob, *, last: bool = False) -> Pending:
        """Contribute; see :meth:`._base.Exchange.begin`. Each mean has tensors of its own."""
        self._check_open()
        if self._schema is not None and self._schema.settings.get("operation"):
            mean = cast("ResumableJob", job)
            if self._life is None:
                settings = Fixed(self.world_size, self.settings.grace, return_within=0.0)
                self.settings = settings  # nobody could come back
                self.restore([mean])
            self._running().take_mean(mean)
        return super().begin(job, last=last)
