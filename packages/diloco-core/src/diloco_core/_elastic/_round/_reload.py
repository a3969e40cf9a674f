"""The one exception by which parts of an elastic exchange tell it that the life has to start again from the store.

It is an exception, and not a value that is returned, since it is found out deep inside reading and writing: while shards are
streamed, while a record is read for somebody else's sake, while a damaged object is made again. Everything between there and
the exchange has only to let go of what it holds.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._log._records import Rollback


class Why(Enum):
    """Why what a life holds is of no use."""

    SUPERSEDED = "what it needs is gone, because newer state is complete"
    DAMAGED = "something that it would go on from is damaged, and is made again while loading"
    REPLACED = "the record that it stands at was lost, and something else was decided in its place"
    WENT_BACK = "the run goes on from older states"
    DIFFERS = "it is not the state that the others hold"
    CHANGED = "it is not the state that it was after the last sync: it changed in memory"


class Reload(Exception):  # noqa: N818 - never leaves the exchange
    """What this life holds is of no use: start again from the newest published state.

    Where something was found damaged, that error is its ``__cause__``.

    Attributes:
        why: Why.
        rollback: What was decided, where the run went back.
    """

    def __init__(self, why: Why, rollback: Rollback | None = None) -> None:
        super().__init__(why.value)
        self.why = why
        self.rollback = rollback
