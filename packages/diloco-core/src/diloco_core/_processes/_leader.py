"""The outer loop that the leader of a replica runs, over the twin of the processes' model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from .._errors import SyncError
from .._exchange._base import Exchange
from .._exchange._report import SyncReport
from .._loop._diloco import DiLoCo
from .._terms._schedule import Schedule
from ._counting import CountingOptimizer
from ._inside import Inside
from ._moves import Done, Gather, Mail, Progress, Spread, disagreement, failed
from ._values import Pair, gather, spread

Ask: TypeAlias = Callable[[Iterable[torch.Tensor]], None]


class LeaderLoop(DiLoCo):
    """An outer loop over a twin, which asks the processes for values before every sync.

    Args:
        twin: The twin.
        exchange: The leader's connection to the store.
        ask: Called with the tensors of the fragment that is about to be synced.
        **options: Further arguments of :class:`.DiLoCo`.
    """

    def __init__(
        self,
        twin: torch.nn.Module,
        exchange: Exchange,
        ask: Ask,
        **options: Any,
    ) -> None:
        self.counting = CountingOptimizer(twin.parameters())
        self._ask = ask
        super().__init__(twin, self.counting, exchange, **options)

    def progress(self) -> Progress:
        """Return where this loop stands."""
        schedule, since = self._schedule, self._count.since_event
        return Progress(
            self.committed,
            self.inner_steps,
            self.syncing,
            self._membership.own.behind,  # type: ignore[union-attr]
            schedule.due_in(since, sent=self.syncing) if isinstance(schedule, Schedule) else 1,
        )

    def take(self, mails: Sequence[Mail]) -> None:
        """Take what the processes have for this replica: their tokens, and rates to be set."""
        if tokens := sum(mail.tokens for mail in mails):
            self.count_tokens(tokens)
        for value, group in dict.fromkeys(rate for mail in mails for rate in mail.rates):
            self.set_outer_lr(value, group=group)

    def _check_before_sync(self) -> None:
        number = self._schedule.turn(self._count.decisions)
        self._ask(named.tensor for named in self._fragments[number].followed())
        super()._check_before_sync()


class Leading:
    """The leader's side of what the processes do together. Not thread-safe.

    Args:
        inside: The processes.
        pairs: All tensors of the model, each with what stands for it in the twin.
        make: Makes the leader's loop, given what asks the processes for values and what takes the
            reports of syncs.

    Attributes:
        loop: The leader's loop.
        pairs: The tensors, as they are now.
    """

    def __init__(
        self,
        inside: Inside,
        pairs: Sequence[Pair],
        make: Callable[[Ask, Callable[[SyncReport], None]], LeaderLoop],
    ) -> None:
        self._inside, self.pairs = inside, pairs
        self._number = {id(whole): number for number, (_, whole) in enumerate(pairs)}
        self._seen = self._versions()
        self._asked: set[int] = set()
        self._mail = Mail()
        self._reports: list[SyncReport] = []
        self.loop = make(self._ask, self._reports.append)

    def together(self, act: Callable[[], Any], mail: Mail, *, everything: bool = False) -> Done:
        """Carry out a part of the loop, and tell the others what they have to do for it.

        Args:
            act: The part, such as a step of the counting optimizer.
            mail: What this process itself has for the leader.
            everything: Whether the values of all tensors are needed before it begins.
        """
        self._asked, self._mail = set(), mail
        try:
            if everything:
                self._gather(range(len(self.pairs)))
            result = act()
        except BaseException as error:
            self._inside.share(failed(error))
            raise
        self._spread()
        done = Done(self.loop.progress(), tuple(self._reports), result)
        self._reports.clear()
        self._inside.share(done)
        return done

    def _ask(self, tensors: Iterable[torch.Tensor]) -> None:
        self._gather(self._number[id(tensor)] for tensor in tensors)

    def _gather(self, numbers: Iterable[int]) -> None:
        self._spread()  # what was adopted just now is not to be read as it was before
        wanted = tuple(number for number in numbers if number not in self._asked)
        if not wanted:
            return
        first = not self._asked
        self._asked.update(wanted)
        self._inside.share(Gather(wanted, first))
        mails = self._inside.collect(self._mail) if first else []
        gather(self.pairs[number] for number in wanted)
        self._seen = self._versions()
        if first:
            if problem := disagreement(mails):
                raise SyncError(problem)
            self.loop.take(mails)

    def _spread(self) -> None:
        versions = self._versions()
        changed = tuple(
            number
            for number, (now, before) in enumerate(zip(versions, self._seen, strict=True))
            if now != before
        )
        self._seen = versions
        if changed:
            self._asked.update(changed)
            self._inside.share(Spread(changed))
            spread(self._inside, [self.pairs[number] for number in changed])

    def _versions(self) -> list[int]:
        """Return a number for each tensor of the twin that every write into it increases."""
        return [whole._version for _, whole in self.pairs if whole is not None]  # noqa: SLF001
