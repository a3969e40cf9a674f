"""One sync of an elastic run: contribute, wait for the record, obey it."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from ..._arithmetic._sharded import carried_groups
from ..._errors import CorruptedObjectError, DivergedError, SyncError, SyncTimeoutError
from ..._exchange._base import SyncReport
from .._life import Reload, RolledBack, Traffic
from .._log._delta import ChangedError, schema
from .._log._keys import Delta, Hint, commit_key, deltas, highest_epochs
from .._log._records import Commit
from .._log._rules import expected, former_farewells, in_force, may_commit, valid
from .._repair import answer, commit_mended, read_commit
from .._start import check_run
from .._states._initial import mend_initial
from .._states._publish import collect, publish_when_asked
from ._adopt import Adoption
from ._catchup import diverged
from ._fork import check_next, look_back

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .._life import Life

_log = logging.getLogger("diloco_core")


class ElasticSync:
    """The next sync of one life. Used once.

    Args:
        life: Whose.
        patience: Where given, seconds after which this life leaves without the sync, and sooner if nobody is left to wait
            for; otherwise the sync must be completed in time.
    """

    def __init__(self, life: Life, patience: float | None = None) -> None:
        self._life = life
        self._patience = patience
        self._sync = life.sync + 1
        self._index = life.index(self._sync)
        self._progress = life.fragments[self._index]
        self._job = self._progress.job
        self._schema = schema(life.run, self._job)
        self._base = self._progress.digest
        # A life contributes once to a sync, also if it did not wait for the end the first time.
        self._open, life.open = (
            (life.open if life.open and life.open.sync == self._sync else None),
            None,
        )
        self._own = self._open
        self._missing: list[int] = []
        self._contributed: list[int] = []
        self._elsewhere: list[int] = []

    def run(self) -> SyncReport:
        """Run it; afterwards this life stands at the sync's state.

        Raises:
            Reload: This life's state is of no use.
            GaveUp: Nobody was left to wait for.
            SyncTimeoutError: Too few replicas contributed in time; nothing was decided.
            NonFiniteDeltaError: The own contribution holds NaN or infinity; nothing was sent.
        """
        life = self._life
        life.traffic = Traffic()
        start = life.timing.clock()
        found = commit_mended(life, self._sync)
        if found is None:
            if self._own is None and self._job.steps is not None:
                self._contribute(*self._job.steps)
            try:
                found = self._wait()
            except GaveUp:
                life.open = self._own
                raise
        commit, record = found
        self._check(commit)
        self._say_who_is_missing(commit)
        fate = self._fate(commit)
        learned = self._job.progress() if fate == "carried" else []
        if (
            fate == "counted"
            and self._open
            and self._job.steps
            and self._open.stop < self._job.steps[1]
        ):
            _log.warning(
                "rank %d: inner steps %d to %d are dropped: they came after the contribution to sync %d, whose end this "
                "replica had not waited for",
                life.rank,
                self._open.stop,
                self._job.steps[1],
                self._sync,
            )
        if (
            fate == "dropped"
            and self._job.steps
            and life.rank not in {member.rank for member in commit.members}
        ):
            _log.warning(
                "rank %d: sync %d was decided without this replica, which was late. Its inner steps %d to %d are lost, since "
                "late='drop'.",
                life.rank,
                self._sync,
                *self._job.steps,
            )
        Adoption(life, commit, local=fate == "counted" and self._open is None).run()
        if learned:
            self._job.reapply(learned)
        life.advance(commit, record)
        if commit.members[commit.sync % len(commit.members)].rank == life.rank:
            collect(life)
        return SyncReport(
            sync=self._sync,
            fragment=self._job.name,
            committed=True,
            members=len(commit.members),
            bytes_sent=life.traffic.sent,
            bytes_received=life.traffic.received,
            wait_seconds=life.traffic.waited,
            exchange_seconds=life.timing.clock() - start - life.traffic.waited,
            contribution=fate,
        )

    def after_reloading(self) -> SyncReport:
        """What has become of it where this life had to start again from the published state.

        The log says it: the sync may have been decided and adopted with the own contribution all the same.
        """
        life = self._life
        commit = self._adopted()
        fate = "none" if self._job.steps is None else "dropped"
        if commit is not None and self._own is not None and self._own in commit.members:
            fate = "counted"
        return SyncReport(
            sync=life.sync,
            fragment=self._job.name,
            committed=commit is not None,
            members=0 if commit is None else len(commit.members),
            bytes_sent=life.traffic.sent,
            bytes_received=life.traffic.received,
            wait_seconds=life.traffic.waited,
            exchange_seconds=0.0,
            contribution=fate,
            reloaded=True,
        )

    def _adopted(self) -> Commit | None:
        """The record of this sync, where what was loaded holds its result."""
        life = self._life
        rollbacks = [rollback for rollback, _ in life.rollbacks]
        if life.sync < self._sync or not in_force(self._sync, self._index, rollbacks):
            return None
        progress = life.fragments[self._index]
        if progress.commit is not None and progress.sync == self._sync:
            return progress.commit
        try:
            found = read_commit(life, self._sync)
        except (RolledBack, CorruptedObjectError):
            return None
        return None if found is None else found[0]

    def stands_in(self) -> bool:
        """Whether an earlier life of this rank has contributed already: it stands for the rank."""
        life = self._life
        listing = life.store.list(deltas(self._sync))
        life.former = former_farewells(listing, life.rank, life.epoch)
        delta = self._valid(listing).get(life.rank)
        return delta is not None and delta.epoch < life.epoch

    def _contribute(self, start: int, stop: int) -> None:
        life, progress = self._life, self._progress
        groups = carried_groups(self._job)
        delta = Delta(
            self._sync, life.rank, life.epoch, start, stop, self._base, self._schema, groups
        )
        if not self._valid({delta.key: progress.format.size(groups) or 0}):
            raise SyncError(
                f"rank {life.rank} would contribute its inner steps {start} to {stop} to sync {self._sync}, but steps up to "
                f"{progress.positions.get(life.rank, 0)} are counted already"
            )
        base = partial(life.shard, progress.sync, self._index)
        parts = partial(
            progress.format.parts, delta, life.chunk_bytes, life.scratch, base, progress.sums
        )
        try:
            life.traffic.sent += life.store.put(delta.key, parts)
        except ChangedError as error:
            _log.error(
                "rank %d: the global copy of fragment %s changed in memory since sync %d (shard %s is not what was published). "
                "Nothing was sent. Reloading the published state; look at this machine's memory.",
                life.rank,
                self._job.name,
                progress.sync,
                error,
            )
            raise Changed from None
        self._own = delta

    def _wait(self) -> tuple[Commit, str]:
        """Wait for the record; create it when this life may."""
        life = self._life

        def look_around() -> None:
            self._look(overdue=wait.elapsed() >= life.settings.grace)

        timeout = life.timing.sync_timeout if self._patience is None else self._patience
        wait = life.wait(timeout, look_around, self._expired, [life.settings.grace], self._notice)
        self._look(overdue=False)
        while (found := commit_mended(life, self._sync)) is None:
            wait.pause()
        life.traffic.waited += wait.elapsed()
        return found

    def _look(self, overdue: bool) -> None:
        life = self._life
        check_run(life)
        listing = life.store.list(deltas(self._sync))
        self._help(listing)
        life.attendance.look(listing, life.now)
        chosen = self._valid(listing)
        others = self._others(listing, chosen)
        self._contributed, self._elsewhere = list(chosen), list(others)
        former = life.former if self._patience is None else ()
        waited_for = expected(life.members, listing, life.absent, former) - others.keys()
        if overdue or waited_for <= chosen.keys():
            self._compare(chosen, others)
        self._missing = sorted(waited_for - chosen.keys())
        if may_commit(
            chosen,
            waited_for,
            rank=life.rank,
            min_replicas=life.manifest.min_replicas,
            overdue=overdue,
        ):
            members = tuple(chosen.values())
            positions = self._progress.counting(members)
            look_back(life)
            outer_steps = self._progress.outer_steps + 1
            commit = Commit(
                self._sync,
                self._index,
                self._base,
                life.previous,
                members,
                positions,
                outer_steps,
                life.rollback,
                run=life.run,
            )
            if life.store.create(commit_key(self._sync), commit.to_json):
                life.decided = commit
        elif (
            self._patience is not None
            and not self._missing
            and commit_mended(life, self._sync) is None
        ):
            raise GaveUp

    def _help(self, listing: Mapping[str, int]) -> None:
        """Another life cannot read something that this one may know."""
        asked = {
            hint for hint in map(Hint.parse, listing) if hint is not None and hint.event == "repair"
        }
        if asked - self._life.answered:
            self._life.answered |= asked
            answer(self._life)
            mend_initial(self._life)
            publish_when_asked(self._life)

    def _valid(self, listing: Mapping[str, int]) -> dict[int, Delta]:
        return valid(
            listing,
            base=self._base,
            schema=self._schema,
            positions=self._progress.positions,
            size=self._progress.format.size,
        )

    def _others(self, listing: Mapping[str, int], chosen: Mapping[int, Delta]) -> dict[int, str]:
        """Ranks that contributed from another state than this life's, and the digest of that."""
        newest: dict[int, Delta] = {}
        for delta in filter(None, map(Delta.parse, listing)):
            if delta.schema == self._schema and newest.get(delta.rank, delta).epoch <= delta.epoch:
                newest[delta.rank] = delta
        return {
            rank: delta.base
            for rank, delta in newest.items()
            if rank not in chosen and delta.base != self._base
        }

    def _compare(self, chosen: Mapping[int, Delta], others: Mapping[int, str]) -> None:
        """Gather: a replica that computes other values than most must not decide anything.

        Where there is no majority, everybody reloads what is published, once: who then differs still is not believed.
        """
        if not others:
            return
        bases = {**dict.fromkeys(chosen, self._base), **others}
        ((most, count),) = Counter(bases.values()).most_common(1)
        if 2 * count <= len(bases):
            if not self._life.differed:
                self._differs(next(iter(others.values())))
        elif most != self._base:
            self._differs(most)

    def _differs(self, theirs: str) -> None:
        _log.error(
            "rank %d: the state of fragment %s after sync %d has digest %s here and %s at other replicas. "
            "Reloading the published state.",
            self._life.rank,
            self._job.name,
            self._progress.sync,
            self._base,
            theirs,
        )
        raise Differs

    def _check(self, commit: Commit) -> None:
        if commit.base != self._base and (commit.sync, commit.previous) == (
            self._sync,
            self._life.previous,
        ):
            self._differs(commit.base)
        check_next(self._life, commit)

    def _fate(self, commit: Commit) -> str:
        """What becomes of what this life has learned since the fragment's last sync."""
        if self._job.steps is None:
            return "none"
        for member in commit.members:
            if member.rank == self._life.rank:
                # Another life of this rank in the record covers the same data: what this one learned must not count again.
                return "counted" if member == self._own else "dropped"
        return "carried" if self._life.settings.late == "carry" else "dropped"

    def _expired(self) -> Exception:
        life = self._life
        if self._patience is not None:
            return GaveUp()
        return SyncTimeoutError(
            f"sync {self._sync} ({self._job.name}) at {life.store.uri} did not get contributions of {life.manifest.min_replicas} "
            f"replicas (min_replicas) within {life.timing.sync_timeout:g} s: {self._who()}. Nothing was decided. Look at "
            "the logs of those that are missing; when enough replicas can be started, the run can be resumed from its prefix.",
            self._missing,
        )

    def _notice(self, seconds: float) -> str:
        """What the log says of a wait that has lasted for a grace and more."""
        life, quorum = self._life, self._life.manifest.min_replicas
        if len(self._contributed) >= quorum and seconds < 2 * life.settings.grace:
            return ""  # one of those that have contributed is about to decide
        end = f"gives up after {life.timing.sync_timeout:g} s"
        if self._patience is not None:
            end = f"is left out after {self._patience:g} s"
        return (
            f"rank {life.rank}: sync {self._sync} ({self._job.name}) has been waiting for contributions of {quorum} replicas "
            f"(min_replicas) for {seconds:.0f} s, and {end}: {self._who()}"
        )

    def _who(self) -> str:
        """Who has contributed, and what is known of everybody else."""
        life = self._life
        ranks = [rank for rank in range(life.manifest.world_size) if rank not in self._contributed]
        lives = highest_epochs(life.store.list("claims/"))
        others = life.attendance.describe(ranks, lives, self._elsewhere, life.now)
        contributed = (
            f"contributed: rank {', '.join(map(str, self._contributed))}"
            if self._contributed
            else ""
        )
        return "; ".join(filter(None, [contributed, others]))

    def _say_who_is_missing(self, commit: Commit) -> None:
        life = self._life
        said = life.attendance.committed(
            commit, lambda: life.store.list(deltas(commit.sync)), life.now
        )
        for level, text in said:
            _log.log(level, "rank %d: %s", life.rank, text)


class GaveUp(Exception):  # noqa: N818 - never leaves the exchange
    """A last sync that could be left out was left out."""


class Differs(Reload):
    """This life's state is not that of the others."""

    def again(self, rank: int) -> Exception:
        """The error where reloading has not helped."""
        return diverged(rank)


class Changed(Reload):
    """This life's state is not what it was after the last sync."""

    def again(self, rank: int) -> Exception:
        """The error where reloading has not helped."""
        return DivergedError(
            f"the global copy of rank {rank} has changed in memory between two syncs, again after reloading: something in "
            "this process writes to it, or the machine's memory is bad. Nothing of it was sent."
        )
