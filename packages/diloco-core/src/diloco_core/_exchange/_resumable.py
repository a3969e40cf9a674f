"""An exchange whose run outlives its replicas: what an outer loop needs of it in addition to :class:`._base.Exchange`.

The run itself is kept by the exchange (in a store, say): the global copy, the outer state, and which inner steps of every
rank are in it. A replica takes the run's newest state where it begins, may come late or come back, and is told after every
sync what became of its contribution. The elastic exchange is one.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .._arithmetic._sync_job import SyncJob
from ._base import Exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from .._arithmetic._layout import Piece
    from .._inner._state import SavedInner
    from .._store._api import Buffer


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a replica in a run.

    Attributes:
        sync: Number of the newest record in the run's log.
        outer_steps: How many outer steps the model has taken: the syncs in the log that were not given up.
        inner_steps: How many inner steps of this rank they have counted.
        rollback: Number of the newest rollback in the log; 0 where there was none.
    """

    sync: int
    outer_steps: int
    inner_steps: int
    rollback: int = 0


class ResumableJob(SyncJob, Protocol):
    """A fragment of the model that is replaced by the run's state where a replica begins, or has to begin again.

    Unlike the job of a single sync it lasts as long as the exchange does.
    """

    @property
    def steps(self) -> tuple[int, int] | None:
        """This replica's inner steps that the next contribution covers: first, and first one after; None: no contribution."""
        ...

    def begin(self) -> None:
        """Look at the model's tensors; comes before anything else is asked for. Repeatable."""
        ...

    def finish(self) -> None:
        """What was adopted is complete: write it to the model where that was not done at once. Repeatable."""
        ...

    def progress(self) -> list[torch.Tensor]:
        """What the replica has learned since the last sync, in one flat tensor per group."""
        ...

    def reapply(self, progress: Sequence[torch.Tensor]) -> None:
        """Add what :meth:`progress` returned to the model again, on top of values that were adopted since."""
        ...

    def install_outer(
        self, chunks: Mapping[Piece, Mapping[str, torch.Tensor]], scalars: Mapping[str, float]
    ) -> None:
        """Replace the outer optimizer's state of some chunks by what was published."""
        ...

    def forget_outer(self, chunks: Iterable[Piece]) -> None:
        """Let go of the outer optimizer's state of some chunks: another replica updates them now."""
        ...


class ResumableExchange(Exchange):
    """One replica's connection to a run that outlives it. Used from one thread at a time.

    An exchange of this kind derives from this class: an outer loop is told by that, once, when it is made. ``join`` only
    says what the replicas must have in common; ``restore`` takes the run's state. ``sync`` may replace the whole model, and
    its report says so (``reloaded``).
    """

    @abstractmethod
    def restore(self, jobs: Sequence[ResumableJob]) -> Position:
        """Begin the run with what the jobs hold, or join it and take its newest state.

        Args:
            jobs: All fragments, in the order in which they are synced.
        """

    @abstractmethod
    def behind(self) -> bool:
        """Whether there is a sync that this replica can take without contributing; asked between syncs."""

    @property
    @abstractmethod
    def position(self) -> Position:
        """Where this replica stands in the run; after :meth:`restore`."""

    @property
    @abstractmethod
    def counted(self) -> int:
        """How many inner steps of this rank the run has counted, in all of its lives; 0 before :meth:`restore`."""

    @abstractmethod
    def save_inner(self, parts: Callable[[str], Iterable[Buffer]]) -> None:
        """Keep what belongs to this replica alone, for the next life of its rank; replaces what was kept before.

        Args:
            parts: Makes the bytes that are kept, given what they are bound to.
        """

    @abstractmethod
    def saved_inner(self) -> Iterator[SavedInner]:
        """What earlier lives of this rank have kept, the newest first."""

    @abstractmethod
    def given_up(self, sync: int, rollback: int) -> bool:
        """Whether something that the model held after a sync was given up since, or cannot be told from that.

        Args:
            sync: Number of the sync in the log.
            rollback: Number of the newest rollback at that time.
        """
