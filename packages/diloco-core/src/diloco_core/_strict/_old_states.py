"""Which of a replica's published shards are no longer needed."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class OldStates:
    """Keeps the newest two complete states of every fragment, and a third one while the next is being published.

    With them, the whole model is still there as it was one sync before any object that is damaged, whichever fragment that
    belongs to: the fragments that were synced later are taken back, too.

    Args:
        fragments: The number of fragments; 0 for plain means, of which nothing is kept.
        previous: When a run is resumed: for each of its last syncs, the oldest first, one for each fragment, the keys of the
            shards of this replica that the sync has superseded.
    """

    def __init__(self, fragments: int, previous: Sequence[Iterable[str]] = ()) -> None:
        self._fragments = fragments
        self._kept: deque[list[str]] = deque(map(list, previous))

    def supersede(self, keys: Iterable[str]) -> list[str]:
        """Note what a sync has superseded. Returns what may be deleted when all replicas have finished that sync."""
        self._kept.append(list(keys))
        return self._kept.popleft() if len(self._kept) > self._fragments else []
