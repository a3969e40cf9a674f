"""What one sync of a life leaves to the next one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from .._records._keys import Delta


@dataclass(slots=True)
class Handover:
    """What one sync of a life leaves to the next one. Written by syncs, and by the exchange, which knows how they ended.

    Attributes:
        open: This life's contribution to a sync whose end it did not wait for; None if there is none.
        absent: Ranks whose shards others had to update, so that the next sync does not wait for them. The adoption of another
            result, which shows them anew, forgets them first.
        former: Hints of lives that left before the run was resumed. They are ignored, so that these ranks are waited for.
        differed: Whether this life has started again because its state differed from the others' or had changed in memory, and
            has completed no sync since.
    """

    open: Delta | None = None
    absent: set[int] = field(default_factory=set)
    former: Collection[str] = ()
    differed: bool = False

    def take_open(self, sync: int) -> Delta | None:
        """Take the contribution that was left open: returns it if it is for this sync, and forgets it in any case."""
        contribution, self.open = self.open, None
        return contribution if contribution is not None and contribution.sync == sync else None
