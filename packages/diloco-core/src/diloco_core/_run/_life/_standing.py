"""Where a life stands in the log of syncs, and what it holds there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError
from .._records._keys import commit_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..._arithmetic._rate import Rate
    from .._records._manifest import Manifest
    from .._records._records import Commit, Rollback
    from ._progress import Progress


class Standing:
    """Where a life stands in the log. It moves only by the methods below; all other code only reads.

    Loading sets it to a state (:meth:`hold`, :meth:`heed`, :meth:`begin`, :meth:`skip`, :meth:`turn_back`). Replaying the log and
    completing a sync move it on by one number (:meth:`advance`, :meth:`skip`, :meth:`pass_over`, :meth:`turn_back`).

    Args:
        fragments: What the life holds of each fragment.
        manifest: The run's manifest.
        uri: The run's prefix, for errors.
        clock: The life's clock.
    """

    def __init__(
        self,
        fragments: Sequence[Progress],
        manifest: Manifest,
        uri: str,
        clock: Callable[[], float],
    ) -> None:
        self._fragments = list(fragments)
        self._manifest = manifest
        self._everybody = dict.fromkeys(range(manifest.world_size), 0)
        self._uri = uri
        self._clock = clock
        self._sync = 0
        self._previous = ""
        self._members: dict[int, int] = {}
        self._rollback = 0
        self._rollbacks: list[tuple[Rollback, str]] = []
        self._since = self._seen = 0.0
        self._is_new = True

    @property
    def fragments(self) -> Sequence[Progress]:
        """What the life holds of each fragment."""
        return self._fragments

    @property
    def sync(self) -> int:
        """The last sync that the life has adopted."""
        return self._sync

    @property
    def previous(self) -> str:
        """Digest of that sync's record (before the first sync: of the manifest); empty if the sync was given up and not read."""
        return self._previous

    @property
    def members(self) -> Mapping[int, int]:
        """The members of that sync, as epoch by rank; before the first sync, all ranks with epoch 0."""
        return self._members

    @property
    def rate(self) -> Rate:
        """The learning rate of the newest outer step that the states in memory hold."""
        commits = [progress.commit for progress in self._fragments if progress.commit is not None]
        return max(commits, key=lambda commit: commit.sync).rate if commits else self._manifest.rate

    @property
    def rollback(self) -> int:
        """Number of the newest rollback in the log; 0 if there was none."""
        return self._rollback

    @property
    def rollbacks(self) -> Sequence[tuple[Rollback, str]]:
        """The rollbacks that loading took into account, in the order of the log, each with the digest of its record."""
        return self._rollbacks

    @property
    def seconds(self) -> float:
        """The seconds since it last moved."""
        return self._clock() - self._since

    @property
    def seen(self) -> float:
        """When the life has seen the record of that sync, or when it had loaded its state, by its clock in seconds."""
        return self._seen

    @property
    def is_new(self) -> bool:
        """Whether the life has completed no sync by a contribution of its own; see :meth:`has_contributed`."""
        return self._is_new

    def has_contributed(self) -> None:
        """Note that a sync has counted a contribution of this life: those of earlier ones have no say any more."""
        self._is_new = False

    def has_loaded(self) -> None:
        """Note that the life has just caught up with the log."""
        self._seen = self._clock()

    def index(self, sync: int) -> int:
        """The index of the fragment that a sync is of."""
        return (sync - 1) % len(self._fragments)

    def hold(self, index: int, progress: Progress) -> None:
        """Note that memory now holds this state of a fragment, which was loaded."""
        self._fragments[index] = progress

    def heed(self, rollbacks: Sequence[tuple[Rollback, str]]) -> None:
        """Set the rollbacks that affect what is loaded now."""
        self._rollbacks = list(rollbacks)

    def begin(self) -> None:
        """Move to the beginning of the log, before the first sync."""
        self._sync, self._rollback = self._manifest.first, 0
        self._previous = self._manifest.run()
        self._members = dict(self._everybody)

    def holds(self, rollback: Rollback) -> bool:
        """Whether memory holds the states from which the run continues after a rollback, or states after the rollback."""
        pairs = zip(self._fragments, rollback.states, strict=True)
        return all(
            progress.sync == state or progress.sync > rollback.sync for progress, state in pairs
        )

    def follows(self, commit: Commit) -> bool:
        """Whether a record is the next one in the log, as far as this life has read the log."""
        follows = (commit.sync, commit.fragment) == (self._sync + 1, self.index(self._sync + 1))
        if self._previous:
            follows = follows and (commit.previous, commit.rollback) == (
                self._previous,
                self._rollback,
            )
        return follows and self._counts_on(commit)

    def _counts_on(self, commit: Commit) -> bool:
        """Whether a record's counts continue those of the state before it; True if memory already holds the state after it."""
        progress = self._fragments[commit.fragment]
        # The loaded state of this fragment may be newer than those of other fragments; the log is replayed from the oldest.
        if commit.sync <= progress.sync:
            return True
        counted = progress.counting(commit.members), progress.outer_steps + 1
        return (commit.positions, commit.outer_steps) == counted

    def pass_over(self, sync: int) -> None:
        """Pass over a sync that was given up: its record need not be readable, and its result is not needed."""
        self._sync = sync
        self._previous = ""

    def turn_back(self, rollback: Rollback, record_digest: str) -> None:
        """Move to where the run continues after a rollback whose record has this digest."""
        self._sync = self._rollback = rollback.sync
        self._previous = record_digest
        # As at the beginning of a run, all ranks are waited for.
        self._members = dict(self._everybody)

    def advance(self, commit: Commit, record_digest: str, seen: float | None = None) -> None:
        """Move on by one sync that the life has adopted.

        Args:
            commit: The record of the sync.
            record_digest: Digest of that record.
            seen: When the life has read it, by its clock in seconds; now if left out.
        """
        progress = self._fragments[commit.fragment]
        progress.sync = commit.sync
        progress.commit = commit
        self.skip(commit, record_digest)
        if seen is not None:
            self._seen = seen

    def skip(self, commit: Commit, record_digest: str) -> None:
        """Move on by one sync whose result the state in memory holds already.

        Raises:
            CorruptedObjectError: The state after this sync was published for another record with the same number.
        """
        progress = self._fragments[commit.fragment]
        if progress.sync == commit.sync and progress.commit != commit:
            raise CorruptedObjectError(
                f"{self._uri}/{commit_key(commit.sync)} is undamaged, but the state after that sync was published for another "
                "record with the same number: either that record was lost and the sync decided again, or objects of two runs are "
                "mixed below this prefix"
            )
        self._since = self._seen = self._clock()
        self._sync = commit.sync
        self._rollback = commit.rollback
        self._previous = record_digest
        self._members = {member.rank: member.epoch for member in commit.members}
