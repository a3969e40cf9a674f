"""Exchanges whose store keeps the run: what an outer loop needs from them in addition to :class:`._base.Exchange`.

Such an exchange keeps the global copy, the outer state, and which inner steps of each rank are in them. In a *resumable* run,
a replica takes the run's newest state when it begins, may come back, and learns after each sync what became of its contribution.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .._arithmetic._rate import NO_RATE, Rate
from .._arithmetic._sync_job import SyncJob
from ._base import Exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from .._arithmetic._layout import Piece
    from .._inner._file import SavedInner
    from .._store._api import Buffer


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a replica in a run.

    Attributes:
        sync: Number of the newest record in the run's log.
        outer_steps: The number of outer steps that the model has taken: the syncs in the log that were not given up.
        inner_steps: The number of inner steps of this rank that are counted in these syncs.
        rollback: Number of the newest rollback in the log; 0 if there was none.
        counted: For each fragment, the number of inner steps of this rank that its last sync counted; empty if not known.
        rate: The learning rate of the newest of these outer steps.
        seen: When the replica has seen that newest record, or has loaded the run's state; seconds of the exchange's clock.
        expected: Whether the others wait for the replica in the next sync: it is a member of the last one.
    """

    sync: int
    outer_steps: int
    inner_steps: int
    rollback: int = 0
    counted: Sequence[int] = ()
    rate: Rate = NO_RATE
    seen: float = 0.0
    expected: bool = True


class ResumableJob(SyncJob, Protocol):
    """A fragment of the model, which the run's state replaces when a replica begins or has to begin again.

    Unlike the job of a single sync, it exists as long as the exchange does.
    """

    def begin(self) -> None:
        """Prepare the model's tensors for access; to be called before the other methods. Repeatable."""
        ...

    def finish(self) -> None:
        """Write adopted values to the model where that was not done at once, since all are there now. Repeatable."""
        ...

    def progress(self) -> list[torch.Tensor]:
        """What the replica has learned since the last sync, in one flat tensor per group."""
        ...

    def reapply(self, progress: Sequence[torch.Tensor]) -> None:
        """Add what :meth:`progress` returned to the model again, on top of the values that were adopted since."""
        ...

    def prepare_outer(self, piece: Piece) -> None:
        """Give a chunk its part of an outer state that was loaded, before its first outer step."""
        ...

    def install_outer(
        self, chunks: Mapping[Piece, Mapping[str, torch.Tensor]], scalars: Mapping[str, float]
    ) -> None:
        """Replace the outer optimizer's state of some chunks with the published one."""
        ...

    def forget_outer(self, chunks: Iterable[Piece]) -> None:
        """Drop the outer optimizer's state of some chunks, which another replica updates now."""
        ...


class ResumableExchange(Exchange):
    """One replica's connection to a run that outlives it. To be used by one thread at a time.

    The store also keeps what belongs to one replica alone, for a later life of it.

    An exchange of this kind must derive from this class, by which an outer loop recognizes it when the loop is made. ``join``
    only says what the replicas must have in common; ``restore`` takes the run's state. ``sync`` may replace the whole model;
    its report then has ``reloaded=True``.

    Attributes:
        resumes: Whether this replica was told to resume the run.
        comes_back: Whether an earlier life of its rank was in the run, or the run has been resumed; once it has begun.
    """

    resumes = False
    comes_back = False

    @abstractmethod
    def restore(self, jobs: Sequence[ResumableJob], *, loaded: bool = False) -> Position:
        """Begin the run with the values that the jobs hold, or join it and take its newest state.

        Args:
            jobs: All fragments, in the order in which they are synced.
            loaded: Whether they hold a state that was loaded, with its outer state.
        """

    @abstractmethod
    def behind(self) -> bool:
        """Whether there is a sync that this replica can take without contributing; called between syncs."""

    @property
    @abstractmethod
    def counted(self) -> int:
        """The number of inner steps of this rank, in all of its lives, that the run has counted; 0 before :meth:`restore`."""

    @property
    @abstractmethod
    def position(self) -> Position:
        """The position of this replica in the run; once it has begun."""

    @abstractmethod
    def save_inner(self, parts: Callable[[str], Iterable[Buffer]]) -> None:
        """Save the state that belongs to this replica alone, for the next life of its rank; replaces what was saved before.

        Args:
            parts: Makes the bytes to save. It is given the identity (run and key) that they belong to.
        """

    @abstractmethod
    def saved_inner(self) -> Iterator[SavedInner]:
        """The states that earlier lives of this rank have saved, the newest first."""

    @abstractmethod
    def save_residual(self, parts: Callable[[str], Iterable[Buffer]]) -> None:
        """Save what a codec will have lost if the contribution that is sent next is counted.

        A sync may be counted long before this replica knows and saves its inner state.
        """

    @abstractmethod
    def saved_residuals(self) -> Iterator[SavedInner]:
        """What :meth:`save_residual` has saved, the newest first."""

    @abstractmethod
    def given_up(self, saved: SavedInner) -> bool:
        """Whether a part of what the model held when a state was saved was given up since, or may have been.

        Raises:
            CorruptedObjectError: The state is damaged.
        """
