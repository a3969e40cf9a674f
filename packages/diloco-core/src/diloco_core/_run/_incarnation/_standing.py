"""Where an incarnation stands in the log of syncs, and what it holds there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..._arithmetic._rate import Rate
from ..._errors import CorruptedObjectError
from .._records._keys import commit_key
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
        rollbacks: The rollbacks that loading took into account, in the order of the log, each with
            the digest of its record.
        seen: When the incarnation has seen the record of that sync, or when it had loaded its
            state, by its clock in seconds.
        is_new: Whether the incarnation has completed no sync by a contribution of its own. Once it
            has, those of earlier incarnations have no say any more.
        checked: When the incarnation last saw that the prefix still belongs to its run
            (:func:`.._watch.watch_manifest`).

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
        self.rollbacks: Sequence[tuple[Rollback, str]] = ()
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
        return all(
            progress.sync == state or progress.sync > rollback.sync for progress, state in pairs
        )

    def follows(self, commit: Commit) -> bool:
        """Say whether a record is the next in the log, as far as this incarnation has read it."""
        follows = (commit.sync, commit.fragment) == (self.sync + 1, self.index(self.sync + 1))
        if self.previous:
            follows = follows and (commit.previous, commit.rollback) == (
                self.previous,
                self.rollback,
            )
        return follows and self._counts_on(commit)

    def _counts_on(self, commit: Commit) -> bool:
        """Say whether a record's counts continue those of the state before it.

        Also true if memory already holds the state after it.
        """
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

    def turn_back(self, rollback: Rollback, record_digest: str) -> None:
        """Move to where the run continues after a rollback whose record has this digest."""
        self.sync = self.rollback = rollback.sync
        self.previous = record_digest
        # As at the beginning of a run, all ranks are waited for.
        self.members = dict(self._everybody)

    def advance(self, commit: Commit, record_digest: str, seen: float | None = None) -> None:
        """Move on by one sync that the incarnation has adopted.

        Args:
            commit: The record of the sync.
            record_digest: Digest of that record.
            seen: When the incarnation has read it, by its clock in seconds; now if left out.
        """
        progress = self.fragments[commit.fragment]
        progress.sync = commit.sync
        progress.commit = commit
        self.skip(commit, record_digest)
        if seen is not None:
            self.seen = seen

    def skip(self, commit: Commit, record_digest: str) -> None:
        """Move on by one sync whose result the state in memory holds already.

        Raises:
            CorruptedObjectError: The state after this sync was published for another record with
                the same number.
        """
        progress = self.fragments[commit.fragment]
        if progress.sync == commit.sync and progress.commit != commit:
            raise CorruptedObjectError(
                f"{self.uri}/{commit_key(commit.sync)} is undamaged, but the state after that sync "
                "was published for another record with the same number: either that record was "
                "lost and the sync decided again, or objects of two runs are mixed below this "
                "prefix"
            )
        self._since = self.seen = self.clock()
        self.sync = commit.sync
        self.rollback = commit.rollback
        self.previous = record_digest
        self.members = {member.rank: member.epoch for member in commit.members}
