"""One sync: contribute, wait for the record, obey it.

The decisions on the way are made in :mod:`.._round`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from diloco_protocol.telemetry import Phase

from ..._arithmetic._clip import measure_norms
from ..._arithmetic._rate import Rate, digits, values_of
from ..._arithmetic._sharded import carried_groups
from ..._errors import CorruptedObjectError, SyncError
from ..._exchange._report import SyncReport
from ..._exchange._resumable import ResumableJob
from ..._store._api import Buffer
from .._claims import check_run
from .._incarnation._incarnation import LOST, Incarnation
from .._records._keys import Delta, Hint, Wish, commit_key, deltas, schema
from .._records._records import Commit
from .._records._rules import former_farewells, in_force, rate_of
from .._repair import answer, commit_mended, read_commit
from .._round import _membership as rounds
from .._round._reload import ReloadError, Why
from .._states._load import mend_initial
from .._states._publish import collect, finish
from ._adopt import Adoption
from ._fork import check_not_later, look_ahead, look_back, not_next
from ._messages import notice, report, say_what_is_lost, say_who_is_missing, timed_out


class StoreSync:
    """The next sync of one incarnation, in two halves. Used once.

    Args:
        incarnation: The incarnation.
        job: The fragment that is synced.
        patience: Seconds after which this incarnation leaves without the sync (sooner if no rank is
            left to wait for); None if the sync must be completed in time.
        hurried: Whether this incarnation shall leave without the sync, as long as the sync is not
            decided. It may change at any time.
        window: If replicas contribute by the time: seconds after which they do, counted from when
            each has seen the record of the sync before; otherwise 0. Patience and grace begin then,
            also for an incarnation that waits earlier, because it leaves or an earlier incarnation
            of its rank has contributed: the others are not late yet.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        job: ResumableJob,
        patience: float | None,
        hurried: Callable[[], bool],
        window: float,
    ) -> None:
        self._incarnation = incarnation
        self._window = window
        self._job = job
        self._patience = patience
        self._hurried = hurried
        self._sync = incarnation.sync + 1
        self._index = incarnation.index(self._sync)
        self._progress = incarnation.fragments[self._index]
        self._base = self._progress.digest
        # An incarnation contributes only once to a sync, even if it did not wait for its end the
        # first time.
        self._left_open = incarnation.handover.take_open(self._sync)
        self._own_delta = self._left_open
        self._parts: Callable[[], Iterable[Buffer]] | None = None  # what that holds
        self._round = _round(incarnation, may_leave=patience is not None)
        self._folder = rounds.Folder({}, {}, ())
        self._decided: Commit | None = None
        self._seen = 0.0  # when that was read, by the incarnation's clock
        self._contributing = 0.0

    def contribute(self) -> None:
        """Store this incarnation's contribution, unless the sync is decided already.

        This is the first half.

        Raises:
            NonFiniteDeltaError: The contribution holds NaN or infinity; nothing was sent.
            ReloadError: This incarnation cannot use its state, so there is no second half.
        """
        incarnation = self._incarnation
        incarnation.traffic.begin()
        incarnation.doing.now(Phase.CONTRIBUTING)
        start = incarnation.timing.clock()
        if not incarnation.fixed or incarnation.standing.is_new:
            # Later in a fixed run, nothing is decided before this incarnation has contributed.
            self._look_for_record()
        steps = self._job.contribution.steps
        if incarnation.fixed and steps is None:
            # All ranks are in every sync, also those that have taken no step since the last one.
            counted = self._progress.positions.get(incarnation.rank, 0)
            steps = (counted, counted)
        open_for_own = self._decided is None and self._own_delta is None
        if open_for_own and steps is not None and not self._stands_in():
            self._contribute(*steps)
        self._contributing = incarnation.timing.clock() - start

    def take_back(self) -> None:
        """Delete this incarnation's contribution to a sync that will never be decided."""
        if self._own_delta is not None and self._decided is None:
            self._incarnation.store.delete([self._own_delta.key])

    def _stands_in(self) -> bool:
        """Fixed: whether an earlier incarnation of this rank has contributed.

        That stands for the rank, and nothing is sent.
        """
        incarnation = self._incarnation
        if not incarnation.fixed or not incarnation.standing.is_new:
            return False
        return incarnation.rank in self._round.valid(incarnation.store.list(deltas(self._sync)))

    def finish(self) -> SyncReport:
        """The second half.

        Afterwards this incarnation holds the state after the sync, unless the sync was left out.

        Raises:
            ReloadError: This incarnation cannot use the state that it holds.
            SyncTimeoutError: Too few replicas contributed in time; nothing was decided.
        """
        incarnation = self._incarnation
        start = incarnation.timing.clock() - self._contributing
        commit = self._decided or self._wait()
        if commit is None:
            incarnation.handover.open = self._own_delta
            became = "none" if self._own_delta is None else "open"
            return report(incarnation, self._job, None, became)
        if incarnation.fixed:
            check_not_later(incarnation, commit)
        self._check(commit)
        say_who_is_missing(incarnation, commit)
        own, late = self._own_delta, incarnation.settings.late
        has_learned = self._job.contribution.steps is not None or (incarnation.fixed and bool(own))
        became = rounds.fate(commit, incarnation.rank, own, learned=has_learned, late=late)
        learned = self._job.progress() if became == "carried" else []
        say_what_is_lost(incarnation, commit, became, self._left_open, self._job.contribution.steps)
        local = became == "counted" and self._left_open is None
        designated = commit.members[commit.sync % len(commit.members)].rank == incarnation.rank
        if incarnation.deletes_own:
            # The record of this sync shows that the state before it is complete.
            collect(incarnation, {incarnation.rank, None} if designated else {incarnation.rank})
        Adoption(incarnation, commit, local=local).run()
        if incarnation.fixed:
            look_ahead(incarnation, commit)
        if learned:
            self._job.reapply(learned)
        self._job.rate = commit.rate
        incarnation.standing.advance(commit, self._seen)
        if became == "counted":
            incarnation.standing.is_new = False
        if designated and not incarnation.deletes_own:
            collect(incarnation)
        return report(incarnation, self._job, commit, became, since=start)

    def _look_for_record(self) -> bool:
        """Read the record of the sync. Returns whether it is there."""
        self._decided = commit_mended(self._incarnation, self._sync)
        self._seen = self._incarnation.timing.clock()
        return self._decided is not None

    def after_reloading(self) -> SyncReport:
        """The report of the sync if this incarnation had to start again from the published state.

        The log shows what became of the sync: it may have been decided and adopted with this
        incarnation's contribution all the same.
        """
        commit = self._adopted()
        became = "none" if self._job.contribution.steps is None else "dropped"
        if commit is not None and self._own_delta is not None and self._own_delta in commit.members:
            became = "counted"
        return report(self._incarnation, self._job, commit, became, reloaded=True)

    def _adopted(self) -> Commit | None:
        """Return the record of this sync if the loaded state holds its result; otherwise None."""
        incarnation = self._incarnation
        counts = in_force(self._sync, self._index, incarnation.standing.rollbacks)
        if incarnation.sync < self._sync or not counts:
            return None
        progress = incarnation.fragments[self._index]
        if progress.commit is not None and progress.sync == self._sync:
            return progress.commit
        try:
            return read_commit(incarnation, self._sync)
        except (CorruptedObjectError, ReloadError):
            return None

    def _contribute(self, start: int, stop: int) -> None:
        incarnation, progress = self._incarnation, self._progress
        groups, proposal = carried_groups(self._job), self._job.contribution.proposal
        # Only rank 0 of a fixed run names rates, and only if they are functions of the sync.
        names_rates = incarnation.fixed and incarnation.rank == 0 and proposal.of_sync
        delta = Delta(
            self._sync,
            incarnation.rank,
            incarnation.epoch,
            start,
            stop,
            self._base,
            self._round.schema,
            groups,
            self._job.contribution.tokens,
            digits(proposal.standing.values) if names_rates else "",
        )
        form = incarnation.format(self._index)
        if not self._round.valid({delta.key: form.size(groups, incarnation.rank) or 0}):
            raise SyncError(
                f"rank {incarnation.rank} would contribute its inner steps {start} to {stop} to "
                f"sync {self._sync}, but must continue from those that the run has counted, up to "
                f"{progress.positions.get(incarnation.rank, 0)}, which restore() returned."
            )
        measure_norms(self._job, incarnation.rank, incarnation.scratch)
        self._ask(proposal.wish)
        parts = partial(form.parts, delta, incarnation.scratch)
        incarnation.traffic.count_sent(incarnation.store.put(delta.key, parts))
        self._own_delta, self._parts = delta, parts

    def _standing(self, members: Sequence[Delta]) -> Rate:
        """The learning rate that the sync takes if no replica asks for another one."""
        standing = self._incarnation.standing.rate
        if standing.number:
            return standing
        named = values_of(members[0].rate)
        return Rate(named) if named else self._job.contribution.proposal.standing

    def _ask(self, wish: Sequence[float]) -> None:
        """Ask for another outer learning rate, if this replica wants one.

        To be called before its contribution is put.
        """
        incarnation = self._incarnation
        if wish:
            number = incarnation.standing.rate.number + 1
            rate = Rate(tuple(wish), number, incarnation.rank, incarnation.epoch)
            incarnation.store.put(Wish(self._sync, rate, self._round.schema).key, lambda: [b"\n"])

    def _wait(self) -> Commit | None:
        """Wait for the record, and create it when this incarnation may.

        Returns None if this incarnation continues without the sync.
        """
        incarnation = self._incarnation
        early = 0.0
        if self._window:  # the others contribute only at its end
            ends = incarnation.standing.seen + self._window
            early = max(0.0, ends - incarnation.timing.clock())
        deadline = early + incarnation.settings.grace
        if self._patience is not None:
            self._patience += early
        timeout = incarnation.timing.sync_timeout if self._patience is None else self._patience
        # Nothing is logged about the time in which no other replica is expected.
        wait = incarnation.store.wait(
            timeout,
            self._timed_out,
            alarms=[deadline],
            notice=lambda seconds: notice(
                incarnation, self._sync, self._job.name, self._folder, seconds, self._patience
            ),
            notice_after=early + incarnation.notice_after,
        )
        moment = None
        folder: rounds.Folder | None = self._look()
        decision = rounds.on_look(self._round, folder, overdue=False, expired=False)
        while True:
            if self._leaves(decision) or self._hurried():
                return None
            if moment is not None:
                wait.sleep(moment)
            if self._look_for_record():
                break
            moment = wait.moment()
            folder, expired = self._look() if moment.look else None, moment.expired
            seen = self._folder
            if incarnation.others is not None and seen.missing and (moment.look or expired):
                expired &= not incarnation.others.check(
                    incarnation, seen.missing, self._sync, seen.listing, final=expired
                )
            # In a fixed run no sync is decided without all ranks.
            overdue = moment.elapsed >= deadline and not incarnation.fixed
            decision = rounds.on_look(self._round, folder, overdue=overdue, expired=expired)
        incarnation.traffic.waited += wait.elapsed()
        return self._decided

    def _leaves(self, decision: rounds.Decision) -> bool:
        """Do what is decided. Returns whether this incarnation continues without the sync."""
        match decision:
            case rounds.Create(members):
                self._create(members)
            case rounds.Differ(theirs):
                raise self._differs(theirs)
            case rounds.Expired():
                raise self._timed_out()
            case rounds.Leave(just_looked=True):
                return True
            case rounds.Leave():
                # A replica that has left may have decided the sync before it left.
                return commit_mended(self._incarnation, self._sync) is None
        return False

    def _look(self) -> rounds.Folder:
        """List the sync's folder, answer requests for repair, and note which ranks are there."""
        incarnation = self._incarnation
        check_run(incarnation)
        listing = incarnation.store.list(deltas(self._sync))
        self._help(listing)
        incarnation.attendance.look(listing, incarnation.now)
        self._folder = rounds.read_folder(self._round, listing)
        incarnation.doing.now(Phase.WAITING, self._folder.missing)
        self._mend_own()
        if incarnation.others is not None:
            incarnation.others.compare(incarnation, self._folder.chosen.values())
        return self._folder

    def _mend_own(self) -> None:
        """Write this incarnation's contribution again if the listing shows that it is not whole.

        This is for fixed runs, where no rank goes on without it.
        """
        incarnation, delta, parts = self._incarnation, self._own_delta, self._parts
        arrived = incarnation.rank in self._folder.chosen
        if not incarnation.fixed or delta is None or parts is None or arrived:
            return
        incarnation.say.error(LOST, f"{incarnation.origin(delta.key)} is gone or cut short")
        incarnation.store.put(delta.key, parts)

    def _create(self, members: tuple[Delta, ...]) -> None:
        """Create the record of the sync, unless another incarnation has.

        Only the record that is read afterwards counts.
        """
        incarnation = self._incarnation
        look_back(incarnation)
        commit = Commit(
            self._sync,
            self._index,
            self._base,
            incarnation.standing.previous,
            members,
            self._progress.counting(members),
            self._progress.outer_steps + 1,
            incarnation.rollback,
            rate_of(self._standing(members), self._folder.listing, self._round.schema),
            run=incarnation.run,
        )
        if incarnation.store.create(commit_key(self._sync), commit.to_json):
            incarnation.damage.decided = commit

    def _help(self, listing: Iterable[str]) -> None:
        """Help incarnations that cannot read something which this incarnation may know."""
        hints = {hint for hint in map(Hint.parse, listing) if hint and hint.event == "repair"}
        if self._incarnation.damage.is_asked(hints):
            answer(self._incarnation)
            mend_initial(self._incarnation)
            if self._incarnation.gather:
                finish(self._incarnation, asked=True)

    def _check(self, commit: Commit) -> None:
        """Check that the record follows the state that this incarnation holds.

        Raises:
            CorruptedObjectError: The records in the store do not follow each other.
            ReloadError: It does not, because this incarnation's state is not the run's.
        """
        follows = self._incarnation.standing.follows(commit)
        match rounds.on_record(self._round, commit, follows=follows):
            case rounds.Differ(theirs):
                raise self._differs(theirs)
            case rounds.NotNext():
                raise not_next(self._incarnation, commit)

    def _differs(self, theirs: str) -> ReloadError:
        self._incarnation.say.error(
            "the state of fragment %s after sync %d is not the one that other replicas hold: its "
            "digest is %s in this replica, but %s in others.%s",
            self._job.name,
            self._progress.sync,
            self._base,
            theirs,
            "" if self._incarnation.fixed else " Reloading the published state.",
        )
        return ReloadError(Why.DIFFERS)

    def _timed_out(self) -> Exception:
        return timed_out(self._incarnation, self._sync, self._job.name, self._folder)


def stands_in(incarnation: Incarnation) -> bool:
    """Say whether an earlier incarnation of this rank has already contributed to the next sync.

    That contribution counts for the rank.
    """
    at = _round(incarnation, may_leave=False)
    listing = incarnation.store.list(deltas(at.sync))
    incarnation.handover.former = former_farewells(listing, incarnation.rank, incarnation.epoch)
    delta = at.valid(listing).get(incarnation.rank)
    return delta is not None and delta.epoch < incarnation.epoch


def _round(incarnation: Incarnation, *, may_leave: bool) -> rounds.Round:
    """Return what an incarnation knows about the next sync."""
    sync = incarnation.sync + 1
    progress = incarnation.fragments[incarnation.index(sync)]
    return rounds.Round(
        sync=sync,
        rank=incarnation.rank,
        base=progress.digest,
        schema=schema(incarnation.run, progress.job),
        positions=progress.positions,
        size=incarnation.format(incarnation.index(sync)).size,
        previous=incarnation.standing.previous,
        members=incarnation.standing.members,
        min_replicas=incarnation.manifest.min_replicas,
        absent=frozenset(incarnation.handover.absent),
        # An incarnation that may leave without the sync does not wait for incarnations that have
        # left before.
        former=() if may_leave else frozenset(incarnation.handover.former),
        differed=incarnation.handover.differed,
        may_leave=may_leave,
        everybody=range(incarnation.manifest.world_size) if incarnation.fixed else (),
    )
