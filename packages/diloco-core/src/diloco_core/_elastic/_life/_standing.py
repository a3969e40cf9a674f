"""Where a life stands in the log of syncs, and what it holds there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError
from .._log._keys import commit_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .._log._records import Commit, Rollback
    from ._progress import Progress


class Standing:
    """Where a life stands. It moves only by the methods below; everybody else reads.

    Loading puts it at a state (:meth:`hold`, :meth:`heed`, :meth:`begin`, :meth:`skip`, :meth:`turn_back`), replaying the log
    and completing a sync move it on by one number (:meth:`advance`, :meth:`skip`, :meth:`pass_over`, :meth:`turn_back`).

    Args:
        fragments: What the life holds of each fragment.
        run: Name of the run.
        world_size: How many ranks there may be.
        uri: The run's prefix, for errors.
        clock: The life's clock.
    """

    def __init__(
        self,
        fragments: Sequence[Progress],
        *,
        run: str,
        world_size: int,
        uri: str,
        clock: Callable[[], float],
    ) -> None:
        self._fragments = list(fragments)
        self._run = run
        self._everybody = dict.fromkeys(range(world_size), 0)
        self._uri = uri
        self._clock = clock
        self._sync = 0
        self._previous = ""
        self._members: dict[int, int] = {}
        self._rollback = 0
        self._rollbacks: list[tuple[Rollback, str]] = []
        self._since = 0.0

    @property
    def fragments(self) -> Sequence[Progress]:
        """What the life holds of each fragment."""
        return self._fragments

    @property
    def sync(self) -> int:
        """The last sync that it has adopted."""
        return self._sync

    @property
    def previous(self) -> str:
        """Digest of that sync's record (of the manifest, before the first); empty where it was given up and not read."""
        return self._previous

    @property
    def members(self) -> Mapping[int, int]:
        """Epoch by rank of that sync's members; all ranks, before the first."""
        return self._members

    @property
    def rollback(self) -> int:
        """Number of the newest rollback in the log; 0 where there was none."""
        return self._rollback

    @property
    def rollbacks(self) -> Sequence[tuple[Rollback, str]]:
        """The rollbacks that the last loading took into account, in the order of the log, with their records' digests."""
        return self._rollbacks

    @property
    def seconds(self) -> float:
        """For how long it has stood there."""
        return self._clock() - self._since

    def index(self, sync: int) -> int:
        """Which fragment a sync is of."""
        return (sync - 1) % len(self._fragments)

    def hold(self, index: int, progress: Progress) -> None:
        """Memory holds a state of a fragment that was loaded."""
        self._fragments[index] = progress

    def heed(self, rollbacks: Sequence[tuple[Rollback, str]]) -> None:
        """These are the rollbacks that bear on what is loaded now."""
        self._rollbacks = list(rollbacks)

    def begin(self) -> None:
        """It stands before the first sync."""
        self._sync = self._rollback = 0
        self._previous = self._run
        self._members = dict(self._everybody)

    def holds(self, rollback: Rollback) -> bool:
        """Whether memory holds what the run goes on from after a rollback, or newer states."""
        held = zip(self._fragments, rollback.states, strict=True)
        return all(
            progress.sync == state or progress.sync > rollback.sync for progress, state in held
        )

    def follows(self, commit: Commit) -> bool:
        """Whether a record is the next one of the log, as far as this life has read that."""
        follows = (commit.sync, commit.fragment) == (self._sync + 1, self.index(self._sync + 1))
        if self._previous:
            follows = follows and (commit.previous, commit.rollback) == (
                self._previous,
                self._rollback,
            )
        return follows and self._counts_on(commit)

    def _counts_on(self, commit: Commit) -> bool:
        """Whether a record counts on from the state before it; of a state that is in memory already, that is not known."""
        progress = self._fragments[commit.fragment]
        # What was loaded of this fragment may be newer than what was loaded of the others, from where the log is replayed.
        if commit.sync <= progress.sync:
            return True
        counted = progress.counting(commit.members), progress.outer_steps + 1
        return (commit.positions, commit.outer_steps) == counted

    def pass_over(self, sync: int) -> None:
        """A sync was given up: nobody has to be able to read its record, or to compute its result."""
        self._sync = sync
        self._previous = ""

    def turn_back(self, rollback: Rollback, record: str) -> None:
        """It stands where the run goes on after a rollback whose record has this digest."""
        self._sync = self._rollback = rollback.sync
        self._previous = record
        # As at the beginning: whoever comes is waited for.
        self._members = dict(self._everybody)

    def advance(self, commit: Commit, record: str) -> None:
        """The life has adopted a sync whose record has this digest."""
        progress = self._fragments[commit.fragment]
        progress.sync = commit.sync
        progress.commit = commit
        self.skip(commit, record)

    def skip(self, commit: Commit, record: str) -> None:
        """The state in memory holds this sync already.

        Raises:
            CorruptedObjectError: The state after this sync is that of another record with the same number.
        """
        progress = self._fragments[commit.fragment]
        if progress.sync == commit.sync and progress.commit != commit:
            raise CorruptedObjectError(
                f"{self._uri}/{commit_key(commit.sync)} is whole, but the state after that sync was published for another "
                "record: that was lost and decided again, or objects of two runs are mixed below this prefix"
            )
        self._since = self._clock()
        self._sync = commit.sync
        self._rollback = commit.rollback
        self._previous = record
        self._members = {member.rank: member.epoch for member in commit.members}
