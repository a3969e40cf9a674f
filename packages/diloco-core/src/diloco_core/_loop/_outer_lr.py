"""The outer learning rate of a loop, and a change to it that this replica waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._arithmetic._rate import Proposal, Rate
from .._checks import whole
from .._errors import ConfigurationError
from .._outer._optimizer import LearningRate, checked_lr, lr_of_sync
from .._terms._support import support_of
from . import _notices as notices


@dataclass(eq=False)
class OuterLr:
    """What this replica proposes as the learning rates of each outer step. Not thread-safe.

    Args:
        values: The outer optimizer's own learning rates, one for each outer parameter group.
        schedules: For every group the caller's function of the sync; None if its rate is constant.
        rank: The number of this replica.
    """

    values: tuple[float, ...]
    schedules: Sequence[LearningRate | None]
    rank: int

    def __post_init__(self) -> None:
        self._asked: dict[int, float] = {}  # by group
        self._wish: tuple[float, ...] = ()  # of all groups, as it was proposed last
        self._number = 0  # under which the wish was sent; 0 if it has not been sent yet

    def ask(self, value: object, group: object = None) -> None:
        """Ask for another rate, of all groups or of one, from this replica's next contribution on.

        Raises:
            ConfigurationError: The value is not a positive number, there is no such group, or
                another group's rate is a function, which could not go on as one.
        """
        rate = checked_lr("the outer learning rate", value)
        groups = range(len(self.values))
        if group is not None:
            number = whole("group", group, 0)
            if number not in groups:
                one = "there is only group 0: the loop was made without outer_groups"
                several = (
                    f"the outer parameter groups have the numbers 0 to {len(groups) - 1}, in the "
                    "order of outer_groups"
                )
                raise ConfigurationError(
                    f"group is {number}, but {one if len(groups) == 1 else several}"
                )
            if any(self.schedules[other] for other in groups if other != number):
                raise ConfigurationError(
                    f"set_outer_lr(..., group={number}) cannot change the rate of one group, "
                    "because that of another one is a function of the sync, and a change fixes the "
                    "rates of all. Let the functions of all groups return what you want, or set "
                    "the rate of all groups by leaving group out"
                )
            groups = range(number, number + 1)
        self._asked.update(dict.fromkeys(groups, rate))
        self._number = 0

    def propose(self, last: Rate, sync: int) -> Proposal:
        """Return what this replica proposes for a sync.

        Args:
            last: The rates of the last outer step.
            sync: The number of the outer step, from 1.

        Raises:
            ConfigurationError: The caller's function does not return a positive number.
        """
        standing = last if last.number else Rate(self._of(sync))
        of_sync = not last.number and any(self.schedules)
        if not self._asked:
            return Proposal(standing, of_sync=of_sync)
        self._number = standing.number + 1
        self._wish = tuple(
            self._asked.get(group, value) for group, value in enumerate(standing.values)
        )
        return Proposal(standing, self._wish, of_sync)

    def settle(self, rate: Rate) -> None:
        """Forget what this replica asked for, if an outer step's rate shows that it was answered.

        It may have been heard or overruled.
        """
        if not self._asked or not self._number or rate.number < self._number:
            return
        if rate.values != self._wish:
            if (rate.number, rate.rank) == (self._number, self.rank):
                # An earlier wish of this replica was heard. The later one travels with the next
                # contribution.
                self._number = 0
                return
            wish, taken = _text(self._wish), _text(rate.values)
            notices.log.warning(notices.OTHER_LR, self.rank, wish, taken, rate.rank)
        self._asked, self._number = {}, 0

    def end(self) -> None:
        """Say that a rate was asked for, and no sync came that could have taken it."""
        if self._asked:
            wish = next(iter(self._asked.values()))
            notices.log.warning(notices.UNUSED_LR, self.rank, wish)

    def _of(self, sync: int) -> tuple[float, ...]:
        # An optimizer without a learning rate has no values.
        return tuple(
            value if schedule is None else lr_of_sync(schedule, sync)
            for value, schedule in zip(self.values, self.schedules, strict=False)
        )


def _text(values: Sequence[float]) -> str:
    """Learning rates as text: one number if all outer parameter groups have the same."""
    return ", ".join(f"{value:g}" for value in (values[:1] if len(set(values)) == 1 else values))


def check_changeable(exchange: object) -> None:
    """Refuse to change the learning rate over an exchange that would not tell the others.

    Raises:
        ConfigurationError: The exchange is of such a kind.
    """
    if support_of(exchange).agrees_on_lr:
        return
    raise ConfigurationError(
        f"set_outer_lr() cannot be used with {type(exchange).__name__}, by which the other "
        "replicas do not learn of a change: a manager only averages. Pass outer_lr as a function "
        "of the sync, which is the same on all replicas, or use an exchange that connect() or "
        "in_process() returned, or a ProcessGroupExchange."
    )
