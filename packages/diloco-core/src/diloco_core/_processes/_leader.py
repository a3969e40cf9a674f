"""The outer loop that the leader of a replica runs, over the twin of the processes' model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from .._errors import ProcessFailedError
from .._exchange._report import SyncReport
from .._loop._diloco import DiLoCo
from .._loop._inner_loop import TrainingProcess
from .._model._loads import Loads
from .._run._exchange import StoreExchange
from .._terms._schedule import Schedule
from ._ending import put_off
from ._inner_states import InnerStates
from ._inside import Inside
from ._moves import (
    Done,
    Failed,
    Mail,
    Move,
    Progress,
    Values,
    check_alike,
    check_mails,
    check_steps,
    failed,
)
from ._values import Now, samples, spread


class LeaderLoop(DiLoCo):
    """An outer loop over a twin, which asks the processes for values before every sync.

    Args:
        twin: The twin.
        exchange: The leader's connection to the store.
        ask: Called with the tensors of the fragment that is about to be synced.
        loads: Notices what is loaded into the leader's own part of the model.
        **options: Further arguments of :class:`.DiLoCo`.
    """

    def __init__(
        self,
        twin: torch.nn.Module,
        exchange: StoreExchange,
        ask: Callable[[Iterable[torch.Tensor]], None],
        loads: Loads,
        **options: Any,
    ) -> None:
        self._counting = torch.optim.SGD(twin.parameters())  # without gradients, changes nothing
        self._ask = ask
        super().__init__(twin, self._counting, exchange, **options)
        self._loads = loads  # nothing is ever loaded into the twin

    def progress(self) -> Progress:
        """Return where this loop stands."""
        schedule, next_in = self._schedule, (1, 1)
        if isinstance(schedule, Schedule):
            due_in = schedule.due_in(self._count.since_event, sent=self.syncing)
            next_in = (due_in, schedule.period)
        behind = self._membership.own.behind  # type: ignore[union-attr]
        return Progress(self.committed, self.inner_steps, self.syncing, behind, *next_in)

    def count_steps(self, number: int, *, last: bool) -> None:
        """Count inner steps that all processes have taken; the last one may end a period.

        Args:
            number: How many.
            last: Whether the replica ends with them, since it was told to.

        Raises:
            SystemExit: It ends. What can be saved is saved.
        """
        for _ in range(number - 1):
            self._count.count()
        if number:
            self._process.told_to_end = last
            self._counting.step()

    def put_global(self) -> None:
        """Have the twin hold the last committed values, which all processes then get."""
        self._check_settled("global_model()")
        self._model.put_committed()

    def take(self, mails: Sequence[Mail]) -> None:
        """Take what the processes have for this replica: their tokens, and rates to be set."""
        if tokens := sum(mail.tokens for mail in mails):
            self.count_tokens(tokens)
        for mail in mails:
            for value, group in mail.rates:
                self.set_outer_lr(value, group=group)

    def _check_before_sync(self) -> None:
        fragment = self._fragments[self._schedule.turn(self._count.decisions)]
        # What lands in a fixed run replaces the values, whatever they have become since they were
        # sent: those of the processes are not needed, unless some of them are kept (alpha).
        replaced = self._outer_steps.under_way and not (self._membership.elastic or fragment.alpha)
        self._ask(() if replaced else (named.tensor for named in fragment.followed()))
        super()._check_before_sync()


class Leading:
    """The leader's side of what the processes do together. Not thread-safe.

    Args:
        inside: The processes.
        wholes: What stands for the model's tensors in the twin.
        now: Returns what this process holds of these tensors, as they are now.
        process: Handles SIGTERM: while nothing is done together, it ends the leader at once.

    Attributes:
        loop: The leader's loop; it is made with :meth:`ask`.
        reports: Those of the loop's last syncs.
    """

    loop: LeaderLoop

    def __init__(
        self,
        inside: Inside,
        wholes: Sequence[torch.Tensor],
        now: Now,
        process: TrainingProcess,
    ) -> None:
        self._inside, self._wholes, self._now, self._process = inside, wholes, now, process
        self._number = {id(whole): number for number, whole in enumerate(wholes)}
        self._seen = self._versions()
        self._asked: set[int] = set()
        self._mail: Callable[[], Mail] | None = None  # asked for once
        self._samples: dict[int, list[float]] = {}
        self.reports: list[SyncReport] = []

    def together(
        self,
        act: Callable[[LeaderLoop], Any] | None,
        mail: Callable[[], Mail],
        steps: int,
        *,
        ends: bool = False,
    ) -> Done:
        """Carry out a part of the loop, and tell the others what they have to do for it.

        Args:
            act: What is done once the steps are counted, with the values of all tensors.
            mail: Returns what this process itself has for the leader.
            steps: How many inner steps this process has taken since all met last.
            ends: Whether the replica ends, since it was told to.
        """
        self._asked, self._mail = set(), mail
        try:
            if act or ends:
                self._gather(range(len(self._wholes)))
            with self._process.between_steps():
                self.loop.count_steps(steps, last=ends)
                result = act and act(self.loop)
        except ProcessFailedError:
            raise  # nobody is there to be told
        except BaseException as error:
            # A signal in the middle of what all do together: the others do not wait for a move.
            if isinstance(error, Exception) or not self._process.training:
                self._inside.share(failed(error))
                self._inside.common = error
            raise
        reports, changed = tuple(self.reports), self._changed()
        done = Done(self.loop.progress(), reports, result, self._mail is None, steps, changed)
        self.reports.clear()
        self._inside.share(done)
        if changed:
            spread(self._inside, self._now, changed)
        self._remember()
        return done

    def _remember(self) -> None:
        """Keep what the processes have agreed on; other tensors have moved since an earlier time.

        Processes may round differently, so what they have not agreed on since differs already.
        """
        if self._asked:
            self._samples = {
                number: values if number in self._asked else self._samples.get(number, values)
                for number, values in samples(self._now()).items()
            }

    def ask(self, tensors: Iterable[torch.Tensor]) -> None:
        """Gather the values of tensors that have not been gathered or adopted just now."""
        with put_off(self._process):
            self._gather(self._number[id(tensor)] for tensor in tensors)

    def _gather(self, numbers: Iterable[int]) -> None:
        changed = self._changed()  # it is not to be read as it was before
        wanted = tuple(number for number in numbers if number not in self._asked)
        if not (changed or wanted or self._mail):
            return
        self._asked.update(wanted)
        self._inside.share(Values(changed, wanted, bool(self._mail)))
        found = spread(self._inside, self._now, changed, wanted, self._mail)
        self._seen, self._mail = self._versions(), None
        if mails := [mail for mail in found if mail is not None]:
            check_mails(mails)
            if self._samples:
                check_alike([mail.samples for mail in mails], self._samples)
            self.loop.take(mails)

    def _changed(self) -> tuple[int, ...]:
        """Return the numbers of the tensors that the loop has changed since it was asked last."""
        versions = self._versions()
        changed = tuple(
            number
            for number, (now, before) in enumerate(zip(versions, self._seen, strict=True))
            if now != before
        )
        self._seen = versions
        self._asked.update(changed)
        return changed

    def _versions(self) -> list[int]:
        """Return a number for each tensor of the twin that every write into it increases."""
        return [whole._version for whole in self._wholes]  # noqa: SLF001


def follow(
    inside: Inside, now: Now, mail: Callable[[], Mail], inner: InnerStates, steps: int
) -> Done:
    """Do what the leader says, until it has done its part of the loop.

    Args:
        inside: The processes.
        now: Returns what it holds of the tensors of the model.
        mail: Returns what this process has for the leader.
        inner: Its inner state.
        steps: How many inner steps this process has taken since all met last.

    Raises:
        Exception: What the leader has raised; or it has taken another number of steps.
    """
    while True:
        move: Move = inside.share()
        match move:
            case Done():
                if move.new:
                    spread(inside, now, move.new)
                check_steps({0: move.steps, inside.process: steps})
                return move
            case Failed():
                inside.common = move.error()
                raise inside.common
            # An error of any process comes from the leader, too, unless that went on without.
            case Values():
                with suppress(Exception):
                    asked = mail if move.mail else None
                    spread(inside, now, move.new, move.wanted, asked)
            case _:
                with suppress(Exception):
                    inner.act(move)
