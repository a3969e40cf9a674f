"""The one exception with which parts of an elastic exchange tell it that the life has to start again from the store.

It is an exception and not a returned value, because the need for it appears deep inside reading and writing: while shards are
streamed, while a record is read on behalf of another replica, while a damaged object is made again. All code between there and
the exchange only has to release what it holds.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._records._records import Rollback


class Why(Enum):
    """Why a life cannot use the state that it holds."""

    SUPERSEDED = "what the life needs is gone, because a newer state is complete"
    DAMAGED = "something that the life needs is damaged, and is made again while loading"
    REPLACED = "the last record that the life obeyed was lost, and another was decided in its place"
    WENT_BACK = "the run continues from older states"
    DIFFERS = "the life's state is not the one that the others hold"
    CHANGED = "the life's state has changed in memory since the last sync"


class Reload(Exception):  # noqa: N818 - never leaves the exchange
    """This life cannot use the state that it holds, and has to start again from the newest published one.

    If that is because of damage, the error that describes the damage is the exception's ``__cause__``.

    Attributes:
        why: The reason.
        rollback: The rollback that was decided, if the run went back; otherwise None.
    """

    def __init__(self, why: Why, rollback: Rollback | None = None) -> None:
        super().__init__(why.value)
        self.why = why
        self.rollback = rollback
