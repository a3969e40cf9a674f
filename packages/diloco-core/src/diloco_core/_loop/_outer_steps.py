"""The outer steps of one replica: which fragment is synced next, and what becomes of this replica's contributions."""

from __future__ import annotations

import dataclasses
import logging
import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .._arithmetic._contribution import Contribution
from .._errors import SyncError, UnequalSyncsError
from .._outer._delayed import DelayedFragment
from .._terms._schedule import Schedule
from .._terms._windows import Windows
from . import _notices as notices
from ._arguments import check_counted
from ._counters import Counters
from ._flight import Flight, Sent, undecided
from ._parting import Parting, copied
from ._window_clock import WindowClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from .._exchange._report import SyncReport
    from .._outer._fragment import Fragment
    from .._terms._schedule import Due
    from ._membership import Membership
    from ._outer_lr import OuterLr

_log = logging.getLogger("diloco_core")


class OuterSteps:
    """Syncs the fragments in turn and counts the results. Not thread-safe.

    Args:
        fragments: All of them, in the order of their turns.
        schedule: Says which fragment is next, and when.
        membership: The kind of membership of the run.
        lr: Says which learning rate this replica proposes.
        rank: The number of this replica.
        before: Called before every sync; raises an error if the model must not be synced.
        adopted: Called when values were adopted, before anything is counted.
        on_sync: Called with the report of every sync while this replica trains, or None.
        clock: A clock in seconds, for the reports and for windows.

    Attributes:
        count: The inner and outer steps of this replica.
        training: Whether inner steps are taken between the syncs; False while a replica begins.
    """

    def __init__(
        self,
        fragments: Sequence[Fragment],
        schedule: Schedule | Windows,
        membership: Membership,
        lr: OuterLr,
        rank: int,
        *,
        before: Callable[[], None],
        adopted: Callable[[], None],
        on_sync: Callable[[SyncReport], None] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.count = Counters([0] * len(fragments))
        self.training = False
        self._fragments = fragments
        self._schedule = schedule
        self._membership = membership
        self._lr = lr
        self._rank = rank
        self._before = before
        self._adopted = adopted
        self._on_sync = on_sync
        self._clock = clock
        self._failure = ""
        self._parting = Parting()
        self._sent: Sent | None = None
        self._stood = 0.0  # seconds in which this replica did not train, for the sync under way
        self._delayed = [each for each in fragments if isinstance(each, DelayedFragment)]
        self._mark = 0.0  # when the last sync was adopted
        self._overlap = 0
        self._window = (
            WindowClock(schedule, membership, rank, clock)
            if isinstance(schedule, Windows)
            else None
        )

    def begin(self, *, restored: bool) -> None:
        """Take the same values as the other replicas; see :meth:`.Membership.begin`."""
        self._membership.begin(
            self._fragments, self.count, restored=restored, catch_up=self.catch_up
        )
        self._mark = self._clock()
        self._begin_window()

    def due(self, *, half_taken: bool) -> Due:
        """What has to be done after an inner step.

        Args:
            half_taken: Whether some of several inner optimizers have already taken their next step.
        """
        since_event, sent = self.count.since_event, self._sent
        if self._window is None:
            assert isinstance(self._schedule, Schedule)
            return self._schedule.due(since_event, sent=self.under_way, half_taken=half_taken)
        since_sent = None if sent is None else self.count.inner_steps - sent.sent_at
        return self._window.due(since_event, since_sent, half_taken=half_taken)

    @property
    def waited(self) -> float:
        """Seconds since the window began; 0 if fragments are sent after so many inner steps."""
        return 0.0 if self._window is None else self._window.elapsed

    def may_look(self) -> bool:
        """Whether it is time to look, in the middle of a window, for syncs without this replica. Counts as having looked."""
        return self._window is not None and not self.under_way and self._window.may_look()

    def look(self) -> None:
        """Adopt syncs that were committed without this replica, if there are any."""
        if self._membership.behind():
            self.sync(last=True)  # so that it does not wait for replicas that have left

    @property
    def under_way(self) -> bool:
        """Whether a sync was sent that is not adopted yet."""
        return self._sent is not None

    def send(self) -> None:
        """Send the fragment whose turn it is, and go on training while it is synced. :meth:`sync` adopts the result."""
        self._send(last=False, behind=True)

    def check_under_way(self) -> None:
        """Raise the error of the sync under way if it has failed by now. Does not wait.

        Raises:
            SyncError: It has failed. A replica that has left too early is no failure as yet; :meth:`sync` says so.
        """
        if self._sent is None:
            return
        try:
            self._sent.flight.check()
        except UnequalSyncsError as error:
            self._sent.parted = error
        except BaseException as error:
            self._fail(error)
            raise

    def sync(self, *, last: bool = False) -> SyncReport:
        """Sync the fragment whose turn it is, or adopt the sync under way. Then adopt those that were committed meanwhile.

        Args:
            last: Whether this replica leaves afterwards.

        Raises:
            UnequalSyncsError: Another replica of a fixed run has left after fewer syncs. Call :meth:`part` next.
            SyncError: The sync has failed; see :meth:`._base.Exchange.sync`.
        """
        report = self._next(last)
        self.catch_up()
        self._membership.save_own_state(self.count.inner_steps, self._overlap)
        return report

    def give_up(self, *, adopt: bool = False) -> bool:
        """End the sync under way, if there is one, without waiting for the others.

        Args:
            adopt: Whether to adopt its result if it is there already.

        Returns:
            Whether the exchange can still be used. It cannot if the sync is in a request that takes long.
        """
        sent = self._sent
        if sent is None:
            return True
        sent.flight.stop(self._membership.give_up)
        if adopt and sent.flight.succeeded:
            self._adopt(last=False)
            return True
        self._forget_sent()
        self._failure = self._failure or "SyncError: the sync under way was given up"
        return sent.flight.over

    def catch_up(self) -> None:
        """Adopt the syncs that were committed without this replica."""
        while self._membership.behind():
            self._next(last=True)  # so that it does not wait for replicas that have left

    def drop_open_steps(self) -> None:
        """Set the fragments with inner steps since their last sync back to the values of that sync."""
        for fragment, steps in zip(self._fragments, self.count.since_sync, strict=True):
            if steps or fragment.alpha:
                fragment.start_over()
        self.count.close_all()

    def settle(self) -> list[str]:
        """Restore values that were changed after the last sync without a step. Returns the names of the parameters among them."""
        open_steps = zip(self._fragments, self.count.since_sync, strict=True)
        settled = [fragment for fragment, steps in open_steps if not steps]
        for fragment in settled:
            if fragment.alpha:
                fragment.start_over()  # it holds values of its own without any change
        return [name for fragment in settled for name in fragment.settle()]

    def part(self, error: UnequalSyncsError) -> None:
        """End with the values that all replicas have: another replica has left, so there can be no more syncs."""
        notices.parted(self._rank, str(error), max(self.count.since_sync), self.count.committed)
        self._parting.part(error, self.count.since_event)
        self._membership.save_last(self.count.inner_steps)
        self.drop_open_steps()

    def check_not_parted(self) -> None:
        """Refuse inner steps that can no longer become part of the model, once there are as many as between two syncs.

        Raises:
            UnequalSyncsError: Another replica has left, and this one still trains.
        """
        try:
            self._parting.check_steps(self._schedule.steps)
        except UnequalSyncsError as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise

    def check_whole(self) -> None:
        """Refuse to continue after a failed sync whose error was caught: the copies and the model are undefined.

        Raises:
            SyncError: A sync has failed.
        """
        if self._failure:
            raise SyncError(
                "an earlier sync of this outer loop has failed, and its error was caught. The values of this replica have been "
                "undefined since then, so it cannot continue. Let the error leave the block. Then begin again from a checkpoint "
                f"or, in an elastic run, by connecting again. The error was {self._failure}"
            )

    def _next(self, last: bool) -> SyncReport:
        if self._sent is None:
            self._send(last=last, behind=False)
        return self._adopt(last)

    def _send(self, *, last: bool, behind: bool) -> None:
        self.check_whole()
        self._parting.check_sync()
        start = self._clock()
        self._before()
        count = self.count
        number = self._schedule.turn(count.decisions)
        fragment = self._fragments[number]
        previous = count.published[number]
        contribution = Contribution(
            steps=count.steps(number),
            tokens=count.tokens[number],
            proposal=self._lr.propose(count.rate, count.committed + 1),
            supersedes=() if previous is None else (previous,),
        )
        check_counted(fragment.terms.weighting, contribution.amount, self._rank)
        # The exchange sets the rate to what the sync takes, if it can be another one.
        fragment.contribution, fragment.rate = contribution, contribution.proposal.standing
        membership, sent_at, counted = self._membership, count.inner_steps, self._membership.counted
        try:
            with _ordinary_mode():
                for other in self._delayed:
                    other.detach()
                fragment.depart()
                flight = Flight.of(
                    fragment,
                    partial(membership.begin_sync, fragment, sent_at, last=last),
                    self._clock,
                    begun=behind and not membership.begins_behind,
                )
        except BaseException as error:
            self._fail(error)
            raise
        self._sent = Sent(number, count.since_sync[number], sent_at, counted, flight, behind)
        if behind:
            flight.start(membership.in_background)
        self._stood = self._clock() - start

    def _adopt(self, last: bool) -> SyncReport:
        """Wait for the sync under way, and adopt its result."""
        sent = self._sent
        assert sent is not None
        fragment = self._fragments[sent.number]
        start = self._clock()
        try:
            report = self._result(sent, hurried=sent.behind and last)
            if sent.behind and last and undecided(report):
                # Once more, with all the patience that a replica has that leaves; and with the same contribution, since the
                # others may have counted it by now.
                begin = partial(self._membership.begin_sync, fragment, sent.sent_at, last=last)
                sent.flight = Flight.of(fragment, begin, self._clock, begun=False)
                report = self._result(sent, hurried=False)
            self._settle_residuals(sent.number, report)
            waited = self._clock() - start
            if sent.behind:
                self._before()  # the model may have changed since it was sent
            with _ordinary_mode():
                for other in self._delayed:
                    if other is not fragment:
                        other.attach()
                self._arrive(fragment, report)
            end = self._clock()
            exposed = self._stood + end - start
            report = dataclasses.replace(
                self._complete(report, sent),
                compute_seconds=max(0.0, end - self._mark - exposed),
                hidden_seconds=max(0.0, sent.flight.seconds - waited) if sent.behind else 0.0,
                exposed_seconds=exposed,
            )
            self._mark = end
        except BaseException as error:
            self._fail(error)
            raise
        _log.debug("rank %d: %s", self._rank, report)
        # What was decided before this replica trains belongs to the state that it begins with. The caller does not have the
        # loop yet (`with DiLoCo(...) as outer`), and the inner state is not restored.
        if self._on_sync is not None and self.training:
            self._on_sync(report)
        return report

    def _result(self, sent: Sent, *, hurried: bool) -> SyncReport:
        if sent.parted is not None:
            raise copied(sent.parted)
        try:
            if hurried:
                self._membership.hurry(True)
            with _ordinary_mode():
                return sent.flight.result()
        finally:
            if hurried:
                self._membership.hurry(False)

    def _arrive(self, fragment: Fragment, report: SyncReport) -> None:
        """Give the model the result of a sync."""
        if isinstance(fragment, DelayedFragment) and report.reloaded:
            fragment.attach()
            for each in self._fragments:
                each.start_over()
        elif isinstance(fragment, DelayedFragment) and undecided(report):
            fragment.attach()
        else:
            fragment.arrive(report.contribution)

    def _settle_residuals(self, number: int, report: SyncReport) -> None:
        """Tell the residuals of all fragments what became of the contribution to one, and where the run stands now."""
        # Before this replica trains it contributes nothing, and its residuals are restored after what was decided meanwhile.
        for other, fragment in enumerate(self._fragments if self.training else ()):
            if fragment.residual is None:
                continue
            fate = report.contribution if other == number else "none"
            if fragment.residual.settle(fate, self._membership.counted_in(other)):
                notices.residual_lost(
                    self._rank, fragment.name, report.sync, self._membership.advice
                )

    def _forget_sent(self) -> None:
        self._sent = None
        for fragment in self._delayed:
            fragment.attach()

    def _fail(self, error: BaseException) -> None:
        """Remember that a sync has failed, unless only another replica has left."""
        if self._sent is None or self._sent.flight.over:
            self._forget_sent()
        if not isinstance(error, UnequalSyncsError):
            # Keep only its text: the error itself would keep many frames in memory.
            self._failure = f"{type(error).__name__}: {error}"

    def _complete(self, report: SyncReport, sent: Sent) -> SyncReport:
        """Count a sync. Returns its report, completed with what the exchange cannot know."""
        count, number, inner_steps = self.count, sent.number, sent.inner_steps
        self._sent = None
        self._overlap = count.inner_steps - sent.sent_at
        self._adopted()
        if report.contribution in {"carried", "open"}:
            inner_steps = 0  # the fragment's next sync covers them, and its report counts them
        else:
            count.close(number)
        count.since_event = 0
        if report.committed:
            count.published[number] = report.sync
            count.committed += 1
            count.rate = self._fragments[number].rate
        if report.reloaded:
            count.stand_at(self._membership.position)
            self._say_what_is_lost(number, inner_steps if report.contribution == "dropped" else 0)
            count.close_all()
            if self._membership.counted < sent.counted and self.training:
                notices.went_back(self._rank, self._membership.counted, count.inner_steps)
        self._begin_window()
        self._lr.settle(count.rate)
        values = count.rate.values if report.committed else ()
        return dataclasses.replace(
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

    def _say_what_is_lost(self, number: int, inner_steps: int) -> None:
        """Log which inner steps are lost because this replica has reloaded the whole model.

        Args:
            number: The fragment that was synced.
            inner_steps: How many inner steps of that fragment are dropped.
        """
        steps = list(self.count.since_sync)
        steps[number] = inner_steps
        lost = [
            (fragment.name, count)
            for fragment, count in zip(self._fragments, steps, strict=True)
            if count
        ]
        notices.reloaded(self._rank, self.count.committed, lost)

    def _jump(self) -> int:
        """Continue from the run's count of inner steps for this rank. Returns how many of them this life did not take.

        The run counts more steps than this life took if an earlier life of the rank contributed to the sync. The batches of
        that life must not be learned again. Fragments with unsynced steps return to their last sync: the steps of the earlier
        life now lie between these steps and the next ones, and a contribution can only cover consecutive steps.
        """
        skipped = self._membership.counted - self.count.inner_steps
        if skipped <= 0:
            return 0
        self.count.inner_steps += skipped
        self.drop_open_steps()
        if not self.training:
            return (
                0  # the inner state is restored later, and batches_to_skip counts these steps then
            )
        self._membership.overtaken()
        notices.overtaken(self._rank, skipped)
        return skipped


def _ordinary_mode() -> AbstractContextManager[Any]:
    """Leave torch.inference_mode() for a sync: optimizer state that is created inside it could not be written to later."""
    return torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext()
