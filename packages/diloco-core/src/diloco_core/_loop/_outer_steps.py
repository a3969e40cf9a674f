"""The outer steps of one replica.

They say which fragment is synced next, and what becomes of this replica's contributions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .._arithmetic._contribution import Contribution
from .._errors import SyncError, UnequalSyncsError
from .._exchange._endings import as_text
from .._exchange._report import SyncReport
from .._outer._delayed import DelayedFragment
from .._outer._fragment import Fragment
from .._terms._schedule import Due, Schedule, Windows
from . import _notices as notices
from ._arguments import check_counted
from ._counters import Counters
from ._flight import Flight, Sent, WindowClock, copied, undecided
from ._membership import Membership
from ._outer_lr import OuterLr


@dataclass(eq=False)
class OuterSteps:
    """Syncs the fragments in turn and counts the results. Not thread-safe.

    Args:
        fragments: All of them, in the order of their turns.
        count: The inner and outer steps of this replica.
        schedule: Says which fragment is next, and when.
        membership: The kind of membership of the run.
        lr: Says which learning rate this replica proposes.
        before: Called before every sync; raises an error if the model must not be synced.
        adopted: Called when values were adopted, before anything is counted.
        on_sync: Called with the report of every sync while this replica trains, or None.

    Attributes:
        training: Whether inner steps are taken between the syncs; False while a replica begins.
    """

    fragments: Sequence[Fragment]
    count: Counters
    schedule: Schedule | Windows
    membership: Membership
    lr: OuterLr
    before: Callable[[], None]
    adopted: Callable[[], None]
    on_sync: Callable[[SyncReport], None] | None
    training: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._rank = self.membership.exchange.rank
        self._clock = self.membership.support.clock
        self._failure = ""
        self._parted: UnequalSyncsError | None = None  # another replica has left
        self._dropped_steps = 0  # taken in vain since then
        self._flight: Flight | None = None  # the sync that goes on while this replica trains
        self._delayed = [each for each in self.fragments if isinstance(each, DelayedFragment)]
        self._mark = 0.0  # when the last sync was adopted
        self._overlap = 0
        self._window: WindowClock | None = None
        if isinstance(self.schedule, Windows):
            self._window = WindowClock(self.schedule, self.membership)

    def begin(self, *, restored: bool) -> None:
        """Take the same values as the other replicas; see :meth:`.Membership.begin`."""
        self.membership.begin(self.fragments, self.count, restored=restored, catch_up=self.catch_up)
        self._mark = self._clock()
        self._begin_window()

    def due(self, *, half_taken: bool) -> Due:
        """Return what has to be done after an inner step.

        Args:
            half_taken: Whether some of several inner optimizers have already taken their next step.
        """
        since_event, flight = self.count.since_event, self._flight
        if self._window is None:
            assert isinstance(self.schedule, Schedule)
            return self.schedule.due(since_event, sent=self.under_way, half_taken=half_taken)
        since_sent = None if flight is None else self.count.inner_steps - flight.sent.at
        return self._window.due(since_event, since_sent, half_taken=half_taken)

    @property
    def waited(self) -> float:
        """Seconds since the window began; 0 if fragments are sent after so many inner steps."""
        return 0.0 if self._window is None else self._window.elapsed

    def may_look(self) -> bool:
        """Say whether to look now, in the middle of a window, for syncs without this replica.

        Counts as having looked.
        """
        return self._window is not None and not self.under_way and self._window.may_look()

    def look(self) -> None:
        """Adopt syncs that were committed without this replica, if there are any."""
        if self.membership.behind():
            self.sync(last=True)  # so that it does not wait for replicas that have left

    @property
    def under_way(self) -> bool:
        """Say whether a sync was sent that is not adopted yet."""
        return self._flight is not None

    def check_under_way(self) -> None:
        """Raise the error of the sync under way if it has failed by now. Does not wait.

        Raises:
            SyncError: It has failed. A replica that has left too early is no failure as yet;
                :meth:`sync` says so.
        """
        if self._flight is None:
            return
        try:
            self._flight.check()
        except UnequalSyncsError as error:
            self._flight.parted = error
        except BaseException as error:
            self._fail(error)
            raise

    def sync(self, *, last: bool = False) -> SyncReport | None:
        """Sync the fragment whose turn it is, or adopt the sync under way.

        Then adopt those that were committed meanwhile.

        Args:
            last: Whether this replica leaves afterwards.

        Returns:
            The report; None if another replica of a fixed run has left after fewer syncs, so that
            this one ends with the values that all have; see :meth:`check_not_parted`.

        Raises:
            SyncError: The sync has failed; see :meth:`._base.Exchange.sync`.
        """
        try:
            report = self._sync_at_once(last) if self._flight is None else self._land(last)
            self.catch_up()
        except UnequalSyncsError as error:
            self._part(error)
            return None
        self.membership.own.save(self.count.inner_steps, self._overlap)
        return report

    def give_up(self, *, adopt: bool = False) -> bool:
        """End the sync under way, if there is one, without waiting for the others.

        Args:
            adopt: Whether to adopt its result if it is there already.

        Returns:
            Whether the exchange can still be used. It cannot if the sync is in a long request.
        """
        flight = self._flight
        if flight is None:
            return True
        flight.stop()
        if adopt and flight.report is not None:
            self._land(last=False)
            return True
        self._forget_flight()
        self._failure = self._failure or "SyncError: the sync under way was given up"
        return flight.over

    def catch_up(self) -> None:
        """Adopt the syncs that were committed without this replica."""
        while self.membership.behind():
            self._sync_at_once(last=True)  # and do not wait for replicas that have left

    def drop_open_steps(self) -> None:
        """Set fragments with inner steps since their last sync back to the values of that sync."""
        for fragment, steps in zip(self.fragments, self.count.since_sync, strict=True):
            if steps or fragment.alpha:
                fragment.start_over()
        self.count.close_all()

    def settle(self) -> list[str]:
        """Restore values that were changed after the last sync without a step.

        Returns the names of the parameters among them.
        """
        open_steps = zip(self.fragments, self.count.since_sync, strict=True)
        settled = [fragment for fragment, steps in open_steps if not steps]
        for fragment in settled:
            if fragment.alpha:
                fragment.start_over()  # it holds values of its own without any change
        return [name for fragment in settled for name in fragment.settle()]

    def _part(self, error: UnequalSyncsError) -> None:
        """End with the values that all replicas have.

        Another replica has left, so there can be no more syncs.
        """
        lost = (max(self.count.since_sync), self.count.committed)
        notices.log.warning(notices.PARTED, self._rank, error, *lost)
        self._parted = copied(error)
        self._dropped_steps += self.count.since_event
        self.membership.own.save_last(self.count.inner_steps)
        self.drop_open_steps()

    def check_not_parted(self) -> None:
        """Refuse inner steps that can no longer become part of the model.

        They are refused once there are as many as between two syncs.

        Raises:
            UnequalSyncsError: Another replica has left, and this one still trains.
        """
        parted = self._parted
        if parted is None or self._dropped_steps < self.schedule.steps:
            return
        why = (
            f"Rank {parted.rank} has taken fewer inner steps: its gradient scaler may have skipped "
            "some, or its data may have ended. Let all replicas train until `outer.committed` has "
            "the same value, or give all of them the same number of steps."
        )
        if self.membership.resumes:
            why = (
                "This replica came back to a run whose steps had been counted already. If its loop "
                "then began at step 0 again, it takes too many: let it go on `while "
                "outer.inner_steps < steps`."
            )
        error = UnequalSyncsError(
            f"{parted} This replica is still training, but nothing that it learns can become part "
            f"of the model any more. {why}",
            parted.rank,
        )
        self._failure = as_text(error)
        raise error

    def check_whole(self) -> None:
        """Refuse to continue after a failed sync whose error was caught.

        The copies and the model are undefined then.

        Raises:
            SyncError: A sync has failed.
        """
        if self._failure:
            raise SyncError(
                "an earlier sync of this outer loop has failed, and its error was caught. The "
                "values of this replica have been undefined since then, so it cannot continue. Let "
                "the error leave the block. Then begin again from a checkpoint or, in an elastic "
                f"run, by connecting again. The error was {self._failure}"
            )

    def send(self) -> None:
        """Send the fragment whose turn it is, and go on training. :meth:`sync` adopts the result.

        If another replica has left before, it ends as :meth:`sync` does.
        """
        start = self._clock()
        try:
            sent = self._prepare()
            fragment = self.fragments[sent.number]
            with self._undefined_after_errors(), _ordinary_mode():
                self._depart(fragment)
                self._flight = Flight(fragment, self.membership, sent)
                self._flight.start()
        except UnequalSyncsError as error:
            self._part(error)
        else:
            self._flight.stood = self._clock() - start

    def _prepare(self) -> Sent:
        """Say what this replica contributes with the fragment whose turn it is."""
        self.check_whole()
        if self._parted is not None:
            raise copied(self._parted)
        self.before()
        count = self.count
        number = self.schedule.turn(count.decisions)
        fragment = self.fragments[number]
        contribution = Contribution(
            steps=count.steps(number),
            tokens=count.tokens[number],
            proposal=self.lr.propose(count.rate, count.committed + 1),
        )
        check_counted(fragment.terms.weighting, contribution.amount, self._rank)
        # The exchange sets the rate to what the sync takes, if it can be another one.
        fragment.contribution, fragment.rate = contribution, contribution.proposal.standing
        return Sent(number, count.since_sync[number], count.inner_steps, self.membership.counted)

    def _depart(self, fragment: Fragment) -> None:
        for other in self._delayed:
            other.detach()
        fragment.depart()

    def _sync_at_once(self, last: bool) -> SyncReport:
        """Sync the fragment whose turn it is, while this replica waits."""
        start = self._clock()
        sent = self._prepare()
        fragment, membership = self.fragments[sent.number], self.membership
        with self._undefined_after_errors():
            with _ordinary_mode():
                self._depart(fragment)
                if isinstance(fragment, DelayedFragment):
                    fragment.collect()
                # In a fixed run every sync may be the last one, as another replica may have left.
                may_be_last = last or not membership.elastic
                report = membership.exchange.begin(fragment, last=may_be_last).finish()
            report = self._adopt(sent, report, since=start)
        return self._tell(report)

    def _land(self, last: bool) -> SyncReport:
        """Wait for the sync under way, and adopt its result."""
        flight = self._flight
        assert flight is not None
        start = self._clock()
        with self._undefined_after_errors():
            report = self._result(flight, hurried=last)
            if last and undecided(report):
                # Once more, with all the patience that a replica has that leaves; and with the same
                # contribution, since the others may have counted it by now.
                flight.again()
                report = self._result(flight, hurried=False)
            hidden = max(0.0, flight.seconds - (self._clock() - start))
            self.before()  # the model may have changed since it was sent
            report = self._adopt(flight.sent, report, since=start - flight.stood, hidden=hidden)
        return self._tell(report)

    def _result(self, flight: Flight, *, hurried: bool) -> SyncReport:
        if flight.parted is not None:
            raise copied(flight.parted)
        try:
            if hurried:
                self.membership.exchange.hurry(True)
            with _ordinary_mode():
                return flight.result()
        finally:
            if hurried:
                self.membership.exchange.hurry(False)

    def _adopt(
        self, sent: Sent, report: SyncReport, *, since: float, hidden: float = 0.0
    ) -> SyncReport:
        """Give the model the result of a sync, and count it.

        Returns its report, completed with what the exchange cannot know.

        Args:
            sent: What was sent, and when.
            report: The exchange's report.
            since: When this replica began to wait, by the clock, less the seconds for which it had
                not trained before for this sync.
            hidden: For how many seconds the sync went on while it trained.
        """
        fragment = self.fragments[sent.number]
        self._settle_residuals(sent.number, report)
        with _ordinary_mode():
            for other in self._delayed:
                if other is not fragment:
                    other.attach()
            self._arrive(fragment, report)
        end = self._clock()
        exposed = end - since
        report = replace(
            self._complete(report, sent),
            compute_seconds=max(0.0, end - self._mark - exposed),
            hidden_seconds=hidden,
            exposed_seconds=exposed,
        )
        self._mark = end
        return report

    def _tell(self, report: SyncReport) -> SyncReport:
        notices.log.debug("rank %d: %s", self._rank, report)
        if report.committed:
            members = f"{report.members} replica{'s' * (report.members != 1)}"
            told = (members, report.inner_steps, report.bytes_sent / 1e6)
            place = (self._rank, report.sync, report.fragment)
            notices.log.info(notices.SYNCED, *place, *told, report.exposed_seconds)
        else:
            notices.log.info(notices.NOT_SYNCED, self._rank, report.fragment, report.sync)
        # What was decided before this replica trains belongs to the state that it begins with. The
        # caller does not have the loop yet (`with DiLoCo(...) as outer`), and the inner state is
        # not restored.
        if self.on_sync is not None and self.training:
            self.on_sync(report)
        return report

    def _arrive(self, fragment: Fragment, report: SyncReport) -> None:
        """Give the model the result of a sync."""
        if isinstance(fragment, DelayedFragment) and report.reloaded:
            fragment.attach()
            for each in self.fragments:
                each.start_over()
        elif isinstance(fragment, DelayedFragment) and undecided(report):
            fragment.attach()
        else:
            fragment.arrive(report.contribution)

    def _settle_residuals(self, number: int, report: SyncReport) -> None:
        """Tell all residuals what became of a fragment's contribution and where the run stands."""
        # Before this replica trains it contributes nothing, and its residuals are restored after
        # what was decided meanwhile.
        for other, fragment in enumerate(self.fragments if self.training else ()):
            if fragment.residual is None:
                continue
            fate = report.contribution if other == number else "none"
            if fragment.residual.settle(fate, self.membership.counted_in(other)):
                lost = (fragment.name, report.sync, self.membership.own.advice)
                notices.log.warning(notices.RESIDUAL_LOST, self._rank, *lost)

    def _forget_flight(self) -> None:
        self._flight = None
        for fragment in self._delayed:
            fragment.attach()

    @contextmanager
    def _undefined_after_errors(self) -> Iterator[None]:
        """Remember that a sync has failed, unless only another replica has left."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        if self._flight is None or self._flight.over:
            self._forget_flight()
        if not isinstance(error, UnequalSyncsError):
            # Keep only its text: the error itself would keep many frames in memory.
            self._failure = as_text(error)

    def _complete(self, report: SyncReport, sent: Sent) -> SyncReport:
        """Count a sync; returns its report with the counts."""
        count, number, inner_steps = self.count, sent.number, sent.inner_steps
        self._flight = None
        self._overlap = count.inner_steps - sent.at
        self.adopted()
        if report.contribution in {"carried", "open"}:
            inner_steps = 0  # the fragment's next sync covers them, and its report counts them
        else:
            count.close(number)
        count.since_event = 0
        if report.committed:
            count.committed += 1
            count.rate = self.fragments[number].rate
        if report.reloaded:
            count.stand_at(self.membership.position)
            steps = list(count.since_sync)
            steps[number] = inner_steps if report.contribution == "dropped" else 0
            pairs = zip(self.fragments, steps, strict=True)
            lost = ", ".join(f"{taken} of fragment {each.name}" for each, taken in pairs if taken)
            notices.log.warning(notices.RELOADED, self._rank, count.committed, lost or "none")
            count.close_all()
            counted = self.membership.counted
            if counted < sent.counted and self.training:
                notices.log.warning(notices.WENT_BACK, self._rank, counted, count.inner_steps)
        self._begin_window()
        self.lr.settle(count.rate)
        values = count.rate.values if report.committed else ()
        return replace(
            report,
            sync=count.committed,
            inner_steps=inner_steps,
            outer_lr=values[0] if len(values) == 1 else values or None,
            batches_to_skip=self._jump(),
            total_inner_steps=count.inner_steps,
        )

    def _begin_window(self) -> None:
        if self._window is not None:
            self._window.begin()

    def _jump(self) -> int:
        """Continue from the run's count of inner steps for this rank.

        Returns how many of them this incarnation did not take.

        The run counts more steps than this incarnation took if an earlier incarnation of the rank
        contributed to the sync. The batches of that incarnation must not be learned again.
        Fragments with unsynced steps return to their last sync: the steps of the earlier
        incarnation now lie between these steps and the next ones, and a contribution can only cover
        consecutive steps.
        """
        skipped = self.membership.counted - self.count.inner_steps
        if skipped <= 0:
            return 0
        self.count.inner_steps += skipped
        self.drop_open_steps()
        if not self.training:
            return 0  # the inner state is restored later, and batches_to_skip counts them then
        self.membership.own.overtaken = True
        notices.log.warning(notices.OVERTAKEN, self._rank, skipped)
        return skipped


def _ordinary_mode() -> AbstractContextManager[Any]:
    """Leave torch.inference_mode() for a sync.

    Optimizer state that is created inside it could not be written to later.
    """
    return torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext()
