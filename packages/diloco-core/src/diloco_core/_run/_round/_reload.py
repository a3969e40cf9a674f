"""What the parts of an exchange raise if the incarnation has to start again from the store.

The need for it appears deep inside reading and writing: while a record is read, while a damaged
object is made again.
"""

from __future__ import annotations

from enum import Enum

from ..._errors import CorruptedObjectError, StoreUnavailableError
from .._records._records import Rollback


class Why(Enum):
    """Why an incarnation cannot use the state that it holds."""

    SUPERSEDED = "what the incarnation needs is gone, because a newer state is complete"
    DAMAGED = "something that the incarnation needs is damaged, and is made again while loading"
    REPLACED = (
        "the last record that the incarnation obeyed was lost, and another was decided in its place"
    )
    WENT_BACK = "the run continues from older states"
    DIFFERS = "the incarnation's state is not the one that the others hold"


class ReloadError(Exception):
    """The need to load the newest published state, because the one in memory cannot be used.

    Never leaves the exchange.

    Args:
        why: The reason.
        rollback: The rollback that was decided, if the run went back; otherwise None.
        damage: The error that describes the damage, if that is the reason; otherwise None.
    """

    def __init__(
        self,
        why: Why,
        rollback: Rollback | None = None,
        damage: CorruptedObjectError | StoreUnavailableError | None = None,
    ) -> None:
        super().__init__(why.value)
        self.why = why
        self.rollback = rollback
        self.damage = damage
