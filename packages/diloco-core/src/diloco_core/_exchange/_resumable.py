"""The interface between an outer loop and an exchange whose store keeps the run.

That exchange is :class:`.StoreExchange`. Its store keeps the global copy, the outer state, and
which inner steps of each rank are in them. In a *resumable* run, a replica takes the run's newest
state when it begins, may come back, and learns after each sync what became of its contribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .._arithmetic._layout import Piece
from .._arithmetic._rate import NO_RATE, Rate
from .._arithmetic._sync_job import SyncJob


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a replica in a run.

    Attributes:
        sync: Number of the newest record in the run's log.
        outer_steps: The number of outer steps that the model has taken: the syncs in the log that
            were not given up.
        inner_steps: The number of inner steps of this rank that are counted in these syncs.
        rollback: Number of the newest rollback in the log; 0 if there was none.
        counted: For each fragment, the number of inner steps of this rank that its last sync
            counted; empty if not known.
        rate: The learning rate of the newest of these outer steps.
        seen: When the replica has seen that newest record, or has loaded the run's state; seconds
            of the exchange's clock.
        expected: Whether the others wait for the replica in the next sync: it is a member of the
            last one.
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
    """A fragment of the model, which the run's state replaces whenever a replica begins.

    Unlike the job of a single sync, it exists as long as the exchange does.
    """

    def begin(self) -> None:
        """Prepare the model's tensors for access; to be called before the other methods.

        Repeatable.
        """

    def finish(self) -> None:
        """Write adopted values to the model where that was not done at once; by now, all are there.

        Repeatable.
        """

    def progress(self) -> list[torch.Tensor]:
        """Return what the replica has learned since the last sync, in one flat tensor per group."""

    def reapply(self, progress: Sequence[torch.Tensor]) -> None:
        """Add what :meth:`progress` returned to the model again, on top of values adopted since."""

    def prepare_outer(self, piece: Piece) -> None:
        """Give a chunk its part of an outer state that was loaded, before its first outer step."""

    def install_outer(
        self, chunks: Mapping[Piece, Mapping[str, torch.Tensor]], scalars: Mapping[str, float]
    ) -> None:
        """Replace the outer optimizer's state of some chunks with the published one."""

    def forget_outer(self, chunks: Iterable[Piece]) -> None:
        """Drop the outer optimizer's state of some chunks, which another replica updates now."""
