"""The memory of an incarnation from sync to sync.

It holds what is damaged, what one sync leaves to the next, and what the sync in progress has cost.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from .._records._keys import Delta, Hint
from .._records._records import Commit


@dataclass(slots=True)
class Damage:
    """Which parts of the run are damaged, and which of them this incarnation could write again.

    Loading records the damage that it meets, and replaying the log what it has mended. A sync
    records which requests for repair it has answered and which record it has created.

    Attributes:
        mending: The fragments whose newest state is damaged, with the sync of that state. It is
            made again from the state before. Loading begins with none, since it shows them again.
        reasons: What is wrong with damaged states, by fragment.
        decided: The last record that this incarnation has created, so that it can write that again
            if it is damaged or lost.
    """

    mending: dict[int, int] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    decided: Commit | None = None
    _bad: dict[tuple[int, int], str] = field(default_factory=dict)
    _answered: set[Hint] = field(default_factory=set)

    def found(self, index: int, sync: int) -> str:
        """Return what is wrong with a part of a published state that loading it does not read.

        Empty if nothing is.
        """
        return self._bad.get((index, sync), "")

    def make_again(self, index: int, sync: int, reason: str) -> None:
        """Note that a fragment's newest state is damaged: it has to be made from the one before."""
        self.mending[index] = sync
        self.reasons[index] = reason

    def distrust(self, index: int, sync: int, why: object) -> None:
        """Note that this state is damaged although loading it would not show that."""
        self._bad[index, sync] = str(why).rstrip(".")

    def mended(self, index: int, sync: int) -> None:
        """Note that the state of a fragment was made again and is published as it was before."""
        del self.mending[index]
        self._bad.pop((index, sync), None)

    def is_asked(self, asked: Collection[Hint]) -> bool:
        """Say whether these requests for repair include one that was not answered yet.

        All of them count as answered from now on.
        """
        unanswered = set(asked) - self._answered
        self._answered |= unanswered
        return bool(unanswered)


@dataclass(slots=True)
class Handover:
    """What one sync of an incarnation leaves to the next one.

    Written by syncs, and by the exchange, which knows how they ended.

    Attributes:
        open: This incarnation's contribution to a sync whose end it did not wait for, if any.
        absent: Ranks whose shards others had to update, so that the next sync does not wait for
            them. The adoption of another result, which shows them anew, forgets them first.
        former: Hints of incarnations that left before the run was resumed. They are ignored, so
            that these ranks are waited for.
        differed: Whether this incarnation has started again because its state differed from the
            others' or had changed in memory, and has completed no sync since.
    """

    open: Delta | None = None
    absent: set[int] = field(default_factory=set)
    former: Collection[str] = ()
    differed: bool = False

    def take_open(self, sync: int) -> Delta | None:
        """Return the open contribution if it is for this sync, and forget it in any case."""
        contribution, self.open = self.open, None
        return contribution if contribution is not None and contribution.sync == sync else None


@dataclass(slots=True)
class Traffic:
    """Counters of the sync in progress: payload bytes and seconds.

    The code that reads, writes or waits adds to them.

    Attributes:
        sent: Bytes written.
        received: Bytes read.
        waited: Seconds of waiting for others.
    """

    sent: int = 0
    received: int = 0
    waited: float = 0.0
    _counting: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def begin(self) -> None:
        """Set all counters to 0, since a sync begins."""
        self.sent = self.received = 0
        self.waited = 0.0

    def count_sent(self, size: int) -> None:
        """Count bytes that were written.

        Thread-safe, since several uploads may end at the same time.
        """
        with self._counting:
            self.sent += size
