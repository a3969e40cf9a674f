"""Which published states of a fragment hold all values, where the others hold how a sync has changed them (:mod:`._coded`)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def is_full_turn(turn: int, every: int) -> bool:
    """Whether the state after a sync of a fragment is published whole.

    Args:
        turn: The number of the sync among those of its fragment; 0 for what shares the values with which all begin.
        every: Every so many syncs of the fragment, the values are published whole.
    """
    return turn % every == 0


def since_full(syncs: Iterable[int], is_full: Callable[[int], bool]) -> list[int]:
    """The syncs whose objects make a state, in order: the newest full one, and the updates since.

    Args:
        syncs: The sync after which the fragment has that state, and those of the fragment before, the newest first.
        is_full: Whether the state after one of them is published whole.
    """
    needed: list[int] = []
    for sync in syncs:
        needed.append(sync)
        if is_full(sync):
            break
    return needed[::-1]


@dataclass(frozen=True, slots=True)
class FullStates:
    """Which states of a fragment are full, in a run that numbers syncs from 0; the first of each fragment shares values.

    Attributes:
        every: As for :func:`is_full_turn`.
        fragment: The number of the fragment, and of its first sync.
        fragments: How many fragments are synced in turn.
    """

    every: int
    fragment: int
    fragments: int

    def is_full(self, sync: int) -> bool:
        """Whether the state after a sync of the fragment is published whole."""
        return is_full_turn(sync // self.fragments, self.every)

    def needed(self, sync: int) -> list[int]:
        """The syncs whose objects make the state after a sync of the fragment; see :func:`since_full`."""
        # In the first turns a run that was begun with a loaded outer loop may begin with any fragment.
        later = range(sync, self.fragments - 1, -self.fragments)
        return since_full(chain(later, [self.fragment]), self.is_full)
