"""The inner loop, as the outer loop sees it.

It counts the steps of the inner optimizers, and starts a sync when one is due.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from types import FrameType
from typing import Any

import torch

from .._errors import CoreError, SyncError
from .._inner._kept_weights import KeptWeights
from .._inner._steps import InnerSteps
from .._inner._unseen_changes import UnseenChanges
from .._model._loads import Loads
from . import _notices as notices
from ._global_model import GlobalModel
from ._outer_steps import OuterSteps


@dataclass(eq=False)
class InnerLoop:
    """Follows the inner optimizers of one replica. Not thread-safe.

    Args:
        optimizers: The inner optimizers.
        outer_steps: Carries out the syncs.
        unseen: Detects parameters that are trained without a step of these optimizers; it is told
            about every step seen.
        kept: Detects optimizers that write weights of their own back after a sync.
        loads: Detects values that were loaded into the model since the last step.
        global_model: Refuses steps while the model holds other values than the replica's own.
        process: Refuses steps of another process than the one that trains; knows whether it is to
            end with the step under way.

    Attributes:
        entered: Whether the loop's block has been entered: steps are counted from then on.
        steps: Notices the steps.
    """

    optimizers: InitVar[Sequence[torch.optim.Optimizer]]
    outer_steps: OuterSteps
    unseen: UnseenChanges
    kept: KeptWeights
    loads: Loads
    global_model: GlobalModel
    process: TrainingProcess
    entered: bool = field(default=False, init=False)

    def __post_init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._count = self.outer_steps.count
        # The optimizers that have not stepped since the last sync, by number.
        self._idle = set(range(len(optimizers)))
        self._told_of_idle = False
        self._tried_own_state = False
        many = self.outer_steps.schedule.steps
        self.steps = InnerSteps(optimizers, self._before, self._after, many)

    def enter(self) -> None:
        """Count every step from now on."""
        self.entered = self.steps.in_use = True

    def end_step(self) -> None:
        """Count an inner step that only some of the optimizers have taken, if there is one.

        The others will no longer take it.
        """
        if self._count.step.end():
            self._count.count()

    def _before(self, optimizer: int) -> None:
        self.process.check()
        self.global_model.refuse("a step of the inner optimizer")
        self.unseen.steps()
        self.loads.check()
        self.outer_steps.check_not_parted()
        asked = (self.steps.has_used_gradient, self.steps.has_replaced_gradient)
        if self._count.step.before(optimizer, *asked):
            self._count.count()
            if self.process.told_to_end:
                self._end()

    def _after(self, optimizer: int) -> None:
        self.unseen.seen()
        self.kept.check(optimizer)
        self._idle.discard(optimizer)
        if self._count.step.after(optimizer, self.steps.has_new_gradient):
            self._count.count()
            if not self._tried_own_state:
                # A second time: optimizers create their state in their first step.
                self.outer_steps.membership.own.try_out()
                self._tried_own_state = True
        # Do not sync in the middle of an inner step: that would drop the gradients of the
        # optimizers that have not stepped yet. But an optimizer may never step again, so wait for
        # one period only.
        half_taken = bool(self._count.step.stepped)
        due = self.outer_steps.due(half_taken=half_taken)
        # The sync holds what was learned in the step under way, so it has to count it: a later
        # incarnation begins after it.
        if (due.send or due.adopt) and self._count.step.count_early():
            self._count.count()
        if self.process.told_to_end and (due.adopt or not half_taken):
            self._end()
        if due.send or due.adopt:
            with self.process.between_steps():
                if due.adopt:
                    self._tell_of_idle()
                    self.outer_steps.sync()
                else:
                    self.outer_steps.send()
        elif self.outer_steps.under_way:
            self.outer_steps.check_under_way()
        elif not half_taken and self.outer_steps.may_look():
            with self.process.between_steps():
                self.outer_steps.look()
        self.loads.stepped()

    def _end(self) -> None:
        """Save what can be saved, and leave as a process that SIGTERM has ended.

        The end of the ``with`` block tells the others.
        """
        rank = self.outer_steps.membership.exchange.rank
        notices.log.warning(notices.TOLD_TO_END, rank, self._count.inner_steps)
        try:
            if self.outer_steps.give_up(adopt=True):
                self.outer_steps.membership.own.save_last(self._count.inner_steps)
        except CoreError as error:
            notices.log.warning(notices.NOT_SAVED_AT_THE_END, rank, error)
        raise SystemExit(EXIT_CODE)

    def _tell_of_idle(self) -> None:
        """Log once that a sync came late as it waited for an inner optimizer that never stepped."""
        if self._idle and not self._told_of_idle:
            self._told_of_idle = True
            idle = " and ".join(map(self.steps.describe, sorted(self._idle)))
            schedule, rank = self.outer_steps.schedule, self.outer_steps.membership.exchange.rank
            after = schedule.came_after(self._count.since_event, self.outer_steps.waited)
            notices.log.warning(notices.SYNC_CAME_LATE, rank, schedule.length, after, idle)
        self._idle = set(range(len(self.steps.optimizers)))


# What a shell says of a process that SIGTERM has ended. Code 0 would count as done work, and
# nothing would replace the replica.
EXIT_CODE = 128 + signal.SIGTERM


class TrainingProcess:
    """Remembers which process has made or entered an outer loop, and handles SIGTERM in it.

    The platform takes the machine away, or somebody cancels the run: the signal is put off to the
    end of an inner step, so that what was learned can be saved. Only in the main thread, and only
    where nobody else handles the signal. Between the steps (in a sync, or while the replicas meet
    or leave) nothing is to be saved, and others may be waited for: there the signal ends the block
    at once, and so does a second one anywhere.

    Args:
        same_for: Seconds for which a second signal is the same one, which came here twice.
        clock: Tells the time.

    Attributes:
        told_to_end: Whether the signal has come.
        training: Whether an inner step may be under way.
        error: What the signal ends the block by, between the steps, if another thread has sent it;
            None where it means that the process is to end.
    """

    def __init__(self, same_for: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.told_to_end = self.training = False
        self.error: Exception | None = None
        self._sending = threading.Lock()
        self._number = os.getpid()
        self._same_for, self._clock = same_for, clock
        self._same_until = clock()

    def remember(self) -> None:
        """Remember that this process trains."""
        self._number = os.getpid()

    def is_fork(self) -> bool:
        """Say whether this process was forked from the one that trains."""
        return os.getpid() != self._number

    def check(self) -> None:
        """Refuse another process than the one that trains.

        Raises:
            SyncError: This process was forked from it.
        """
        if self.is_fork():
            raise SyncError(
                f"this process ({os.getpid()}) was forked from the process that trains "
                f"({self._number}), and is not a replica: it must neither step the inner optimizer "
                "nor use the outer loop. Start processes that train with the start method 'spawn', "
                "and give each its own rank."
            )

    @property
    def handles(self) -> bool:
        """Say whether the signal is handled here."""
        return bool(signal.getsignal(signal.SIGTERM) == self._heard)

    def watch(self) -> None:
        """Handle the signal from now on, if it is ours to handle."""
        self._replace_handler(signal.SIG_DFL, self._heard)

    def stop(self) -> None:
        """Leave the signal to others again."""
        with self._sending:
            self._replace_handler(self._heard, signal.SIG_DFL)

    @staticmethod
    def _replace_handler(present: object, new: Any) -> None:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) == present:
            signal.signal(signal.SIGTERM, new)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """While this lasts, no inner step is under way."""
        self.training = False
        yield
        self.training = True

    def interrupt(self, error: Exception) -> None:
        """End the block by an error, if no inner step is under way and the signal is handled here.

        Called by another thread than the main one; if a step is under way, nothing happens.
        """
        with self._sending:
            if self.handles and not self.training and self.error is None:
                self.error = error
                os.kill(os.getpid(), signal.SIGTERM)

    # A handler is given both arguments.
    def _heard(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.is_fork():
            # A child that was forked, such as a worker of a data loader, has this handler too, and
            # must end as it always did.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if self.error is not None:
            ends = isinstance(sys.exc_info()[1], (KeyboardInterrupt, SystemExit))
            if not (self.training or ends):
                raise self.error
            self.error = None  # an inner step has begun meanwhile, or the block ends already
            return
        again, self.told_to_end = self.told_to_end, True
        if again and self._clock() < self._same_until:
            return
        self._same_until = self._clock() + self._same_for
        if again or not self.training:
            raise SystemExit(EXIT_CODE)
