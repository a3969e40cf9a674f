"""Where an incarnation stands in the log of syncs, what it holds there, and its memory.

The memory holds what is damaged, what one sync leaves to the next, and what the sync in progress
has cost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..._arithmetic._rate import Rate
from ..._errors import CorruptedObjectError
from .._records._keys import Delta, Hint, commit_key
from .._records._manifest import Manifest
from .._records._records import Commit, Rollback
from ._progress import Progress


@dataclass(eq=False)
class Standing:
    """Where an incarnation stands in the log. It moves in the log only by the methods below.

    Loading sets it to a state (its fragments and rollbacks, then :meth:`begin`, :meth:`skip` or
    :meth:`turn_back`). Replaying the log and completing a sync move it on by one number
    (:meth:`advance`, :meth:`skip`, :meth:`pass_over`, :meth:`turn_back`).

    Attributes:
        sync: The last sync that the incarnation has adopted.
        previous: Digest of that sync's record (before the first sync: of the manifest); empty if
            the sync was given up and not read.
        members: The members of that sync, as epoch by rank; before the first sync, all ranks with
            epoch 0.
        rollback: Number of the newest rollback in the log; 0 if there was none.
        rollbacks: The rollbacks that loading took into account, in the order of the log.
        seen: When the incarnation has seen the record of that sync, or when it had loaded its
            state, by its clock in seconds.
        is_new: Whether the incarnation has completed no sync by a contribution of its own. Once it
            has, those of earlier incarnations have no say any more.
        checked: When the incarnation last saw that the prefix still belongs to its run
            (:func:`.._claims.watch_manifest`).

    Args:
        fragments: What the incarnation holds of each fragment.
        manifest: The run's manifest.
        uri: The run's prefix, for errors.
        clock: The incarnation's clock.
    """

    fragments: list[Progress]
    manifest: Manifest
    uri: str
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._everybody = dict.fromkeys(range(self.manifest.world_size), 0)
        self.sync = 0
        self.previous = ""
        self.members: Mapping[int, int] = {}
        self.rollback = 0
        self.rollbacks: Sequence[Rollback] = ()
        self._since = self.seen = 0.0
        self.is_new = True
        self.checked = self.clock()

    @property
    def rate(self) -> Rate:
        """The learning rate of the newest outer step that the states in memory hold."""
        commits = [progress.commit for progress in self.fragments if progress.commit is not None]
        return max(commits, key=lambda commit: commit.sync).rate if commits else self.manifest.rate

    @property
    def seconds(self) -> float:
        """The seconds since it last moved."""
        return self.clock() - self._since

    def has_loaded(self) -> None:
        """Note that the incarnation has just caught up with the log."""
        self.seen = self.clock()

    def index(self, sync: int) -> int:
        """The index of the fragment that a sync is of."""
        return (sync - 1) % len(self.fragments)

    def begin(self) -> None:
        """Move to the beginning of the log, before the first sync."""
        self.sync, self.rollback = self.manifest.first, 0
        self.previous = self.manifest.run()
        self.members = dict(self._everybody)

    def holds(self, rollback: Rollback) -> bool:
        """Say whether memory holds the states that a rollback goes back to, or states after it."""
        pairs = zip(self.fragments, rollback.states, strict=True)
        return all(each.sync == state or each.sync > rollback.sync for each, state in pairs)

    def follows(self, commit: Commit) -> bool:
        """Say whether a record is the next in the log, as far as this incarnation has read it."""
        following = self.sync + 1
        if (commit.sync, commit.fragment) != (following, self.index(following)):
            return False
        before = self.previous, self.rollback
        if self.previous and (commit.previous, commit.rollback) != before:
            return False
        progress = self.fragments[commit.fragment]
        # The loaded state of this fragment may be newer than those of other fragments; the log is
        # replayed from the oldest.
        if commit.sync <= progress.sync:
            return True
        counted = progress.counting(commit.members), progress.outer_steps + 1
        return (commit.positions, commit.outer_steps) == counted

    def pass_over(self, sync: int) -> None:
        """Pass over a sync that was given up, whose record and result are not needed."""
        self.sync = sync
        self.previous = ""

    def turn_back(self, rollback: Rollback) -> None:
        """Move to where the run continues after a rollback."""
        self.sync = self.rollback = rollback.sync
        self.previous = rollback.digest
        # As at the beginning of a run, all ranks are waited for.
        self.members = dict(self._everybody)

    def advance(self, commit: Commit, seen: float | None = None) -> None:
        """Move on by one sync that the incarnation has adopted.

        Args:
            commit: The record of the sync.
            seen: When the incarnation has read it, by its clock in seconds; now if left out.
        """
        progress = self.fragments[commit.fragment]
        progress.sync = commit.sync
        progress.commit = commit
        self.skip(commit)
        if seen is not None:
            self.seen = seen

    def skip(self, commit: Commit) -> None:
        """Move on by one sync whose result the state in memory holds already.

        Raises:
            CorruptedObjectError: The state after this sync was published for another record with
                the same number.
        """
        progress = self.fragments[commit.fragment]
        if progress.sync == commit.sync and progress.commit != commit:
            raise CorruptedObjectError(
                f"{self.uri}/{commit_key(commit.sync)} is undamaged, but the state after that sync "
                "was published for another record with the same number: that one was lost and the "
                "sync decided again, or objects of two runs are mixed below this prefix"
            )
        self._since = self.seen = self.clock()
        self.sync = commit.sync
        self.rollback = commit.rollback
        self.previous = commit.digest
        self.members = {member.rank: member.epoch for member in commit.members}


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
