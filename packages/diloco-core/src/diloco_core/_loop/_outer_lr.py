"""The outer learning rate of a loop: the one that it was made with, and a change that this replica waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._arithmetic._rate import Proposal, Rate
from .._errors import ConfigurationError
from .._outer._learning_rate import checked_lr, lr_of_sync
from . import _notices as notices

if TYPE_CHECKING:
    from .._exchange._base import Exchange
    from .._outer._learning_rate import LearningRate


class OuterLr:
    """What this replica proposes as the learning rate of each outer step. Not thread-safe.

    Args:
        values: The outer optimizer's own learning rates, one for each parameter group.
        schedule: The caller's function of the sync; None if the rate is constant.
        rank: The number of this replica.
    """

    def __init__(self, values: tuple[float, ...], schedule: LearningRate | None, rank: int) -> None:
        self._values = values
        self._schedule = schedule
        self._rank = rank
        self._wish: tuple[float, ...] = ()
        self._number = 0  # under which the wish was sent; 0 if it has not been sent yet

    def ask(self, value: object) -> None:
        """Ask for another rate, from the next sync on that this replica contributes to.

        Raises:
            ConfigurationError: The value is not a positive number.
        """
        self._wish = (checked_lr("the outer learning rate", value),) * len(self._values)
        self._number = 0

    def propose(self, last: Rate, sync: int) -> Proposal:
        """What this replica proposes for a sync.

        Args:
            last: The rate of the last outer step.
            sync: The number of the outer step, from 1.

        Raises:
            ConfigurationError: The caller's function does not return a positive number.
        """
        standing = last if last.number else Rate(self._of(sync))
        if self._wish:
            self._number = standing.number + 1
        return Proposal(standing, self._wish)

    def settle(self, rate: Rate) -> None:
        """Forget what this replica has asked for, if the rate of an outer step shows that it was heard or overruled."""
        if not self._wish or not self._number or rate.number < self._number:
            return
        if rate.values != self._wish:
            if (rate.number, rate.rank) == (self._number, self._rank):
                # An earlier wish of this replica was heard. The later one travels with the next contribution.
                self._number = 0
                return
            notices.other_lr(self._rank, self._wish, rate)
        self._wish, self._number = (), 0

    def end(self) -> None:
        """Say that a rate was asked for, and no sync came that could have taken it."""
        if self._wish:
            notices.unused_lr(self._rank, self._wish)

    def _of(self, sync: int) -> tuple[float, ...]:
        if self._schedule is None:
            return self._values
        return (lr_of_sync(self._schedule, sync),) * len(self._values)


def check_changeable(exchange: object) -> None:
    """Refuse to change the learning rate over an exchange by which the others would not learn of it.

    Raises:
        ConfigurationError: The exchange is of such a kind.
    """
    if getattr(exchange, "agrees_on_lr", False):
        return
    raise ConfigurationError(
        f"set_outer_lr() cannot be used with {type(exchange).__name__}, by which the other replicas do not learn of a change: "
        "a manager only averages. Pass outer_lr as a function of the sync, which is the same on all replicas, or use an exchange "
        "that connect() or in_process() returned, or a ProcessGroupExchange."
    )


def schedule_of(outer_lr: object, exchange: Exchange) -> LearningRate | None:
    """The caller's function, if ``outer_lr`` is one. It is called for the first sync, to see that it can be.

    Raises:
        ConfigurationError: It does not return a positive number, or the exchange cannot see to it that all replicas use the
            same one.
    """
    if not callable(outer_lr):
        return None
    lr_of_sync(outer_lr, 1)
    if not (getattr(exchange, "agrees_on_lr", False) or getattr(exchange, "compares_lr", False)):
        raise ConfigurationError(
            f"outer_lr is a function, which cannot be used with {type(exchange).__name__}: it does not see to it that all "
            "replicas use the same learning rate. Pass a number, or use an exchange that connect() or in_process() returned. "
            "(An exchange of your own that does so says it by its attribute agrees_on_lr.)"
        )
    return outer_lr
