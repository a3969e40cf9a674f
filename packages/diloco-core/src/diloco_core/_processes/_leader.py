"""The outer loop that the leader of a replica runs, over the twin of the processes' model."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch

from .._errors import ProcessFailedError
from .._exchange._report import SyncReport
from .._inner._state import Stateful
from .._loop._diloco import DiLoCo
from .._loop._inner_loop import TrainingProcess
from .._model._loads import Loads
from .._run._exchange import StoreExchange
from .._terms._schedule import Schedule
from ._ending import interruptible, put_off
from ._inner_states import InnerStates
from ._inside import Inside
from ._moves import (
    Done,
    Failed,
    Gather,
    InnerMove,
    Mail,
    Move,
    Progress,
    Spread,
    check_alike,
    check_steps,
    failed,
)
from ._values import Now, gather, sampled, samples, spread

Ask: TypeAlias = Callable[[Iterable[torch.Tensor]], None]


class LeaderLoop(DiLoCo):
    """An outer loop over a twin, which asks the processes for values before every sync.

    Args:
        twin: The twin.
        exchange: The leader's connection to the store.
        ask: Called with the tensors of the fragment that is about to be synced.
        inner: The inner states of all processes; None if they are not saved.
        loads: Notices what is loaded into the leader's own part of the model.
        **options: Further arguments of :class:`.DiLoCo`.
    """

    def __init__(
        self,
        twin: torch.nn.Module,
        exchange: StoreExchange,
        ask: Ask,
        inner: Stateful | None,
        loads: Loads,
        **options: Any,
    ) -> None:
        self._counting = torch.optim.SGD(twin.parameters())  # without gradients, changes nothing
        self._ask = ask
        stateful = {} if inner is None else {"processes": inner}
        super().__init__(twin, self._counting, exchange, stateful=stateful, **options)
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
        make: Makes the leader's loop, given what asks the processes for values and what takes the
            reports of syncs.

    Attributes:
        loop: The leader's loop.
    """

    def __init__(
        self,
        inside: Inside,
        wholes: Sequence[torch.Tensor],
        now: Now,
        process: TrainingProcess,
        make: Callable[[Ask, Callable[[SyncReport], None]], LeaderLoop],
    ) -> None:
        self._inside, self._wholes, self._now, self._process = inside, wholes, now, process
        self._number = {id(whole): number for number, whole in enumerate(wholes)}
        self._seen = self._versions()
        self._asked: set[int] = set()
        self._mail: Callable[[], Mail] = Mail
        self._has_mail = False
        self._samples = array("d")
        self._reports: list[SyncReport] = []
        self.loop = make(self._ask, self._reports.append)

    def together(
        self,
        act: Callable[[LeaderLoop], Any],
        mail: Callable[[], Mail],
        steps: int,
        *,
        everything: bool = False,
        ends: bool = False,
    ) -> Done:
        """Carry out a part of the loop, and tell the others what they have to do for it.

        Args:
            act: The part.
            mail: Returns what this process itself has for the leader.
            steps: How many inner steps this process has taken since all met last.
            everything: Whether the values of all tensors are needed before it begins.
            ends: Whether the replica ends, since it was told to.
        """
        self._asked, self._mail, self._has_mail = set(), mail, False
        try:
            if everything or ends:
                self._gather(range(len(self._wholes)))
            with interruptible(self._process):
                self.loop.count_steps(steps, last=ends)
                result = act(self.loop)
        except ProcessFailedError:
            raise  # nobody is there to be told
        except BaseException as error:
            # A signal in the middle of what all do together: the others do not wait for a move.
            if isinstance(error, Exception) or not self._process.training:
                self._inside.share(failed(error))
                self._inside.common = error
            raise
        reports, changed = tuple(self._reports), self._changed()
        done = Done(self.loop.progress(), reports, result, self._has_mail, steps, changed)
        self._reports.clear()
        self._inside.share(done)
        spread_last(self._inside, self._now, changed)
        self._remember()
        return done

    def _remember(self) -> None:
        """Keep what the processes have agreed on; other tensors have moved since an earlier time.

        Processes may round differently, so what they have not agreed on since differs already.
        """
        if not self._asked:
            return
        held = self._now()
        values = samples(held)
        for place, number in enumerate(sampled(held) if self._samples else ()):
            if number not in self._asked:
                values[place] = self._samples[place]
        self._samples = values

    def ask_for_all(self) -> None:
        """Gather the values of all tensors that have not been gathered or adopted just now."""
        self._ask(self._wholes)

    def _ask(self, tensors: Iterable[torch.Tensor]) -> None:
        with put_off(self._process):
            self._gather(self._number[id(tensor)] for tensor in tensors)

    def _gather(self, numbers: Iterable[int]) -> None:
        if changed := self._changed():  # it is not to be read as it was before
            self._inside.share(Spread(changed))
            spread(self._inside, self._now, changed)
        wanted = tuple(number for number in numbers if number not in self._asked)
        first = not self._has_mail
        if not (wanted or first):
            return
        self._asked.update(wanted)
        self._inside.share(Gather(wanted, first))
        found = gather(self._inside, self._now, wanted, self._mail if first else None)
        self._seen = self._versions()
        if mails := [mail for mail in found if mail is not None]:
            self._has_mail = True
            check_steps({number: mail.inner_steps for number, mail in enumerate(mails)})
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


def spread_last(inside: Inside, now: Now, tensors: Sequence[int]) -> None:
    """Spread what all have after a part of the loop; an error is raised on all, and told by none.

    Raises:
        Exception: What any process has raised.
    """
    try:
        if tensors:
            spread(inside, now, tensors)
    except ProcessFailedError:
        raise
    except Exception as error:
        inside.common = error
        raise


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
                spread_last(inside, now, move.tensors)
                check_steps({0: move.steps, inside.process: steps})
                return move
            case Failed():
                inside.common = move.error()
                raise inside.common
        # An error of any process comes from the leader, too, unless that went on without.
        with suppress(Exception):
            match move:
                case Gather():
                    gather(inside, now, move.tensors, mail if move.mail else None)
                case Spread():
                    spread(inside, now, move.tensors)
                case InnerMove():
                    inner.act(move.what)
