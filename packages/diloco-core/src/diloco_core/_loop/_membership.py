"""The kind of membership of a run, as far as an outer loop depends on it: decided once, when the loop is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from .._errors import ConfigurationError, SyncError
from .._exchange._resumable import ResumableExchange
from .._outer._initial import Initial
from ._own_state import OwnState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from .._exchange._base import Exchange
    from .._exchange._pending import Pending
    from .._exchange._resumable import Position
    from .._inner._state import Stateful
    from .._outer._fragment import Fragment
    from ._counters import Counters


class Membership(Protocol):
    """What differs between runs in which all replicas stay to the end, and runs that outlive their replicas.

    Attributes:
        resumable: Whether the run keeps the state, so that nothing of it is saved and loaded by hand.
    """

    resumable: bool

    @property
    def position(self) -> Position:
        """Where this replica stands in a run that keeps its state."""
        ...

    @property
    def counted(self) -> int:
        """How many inner steps of this rank the run has counted in all of its lives, as far as it keeps that."""
        ...

    @property
    def batches_to_skip(self) -> int:
        """See :attr:`.DiLoCo.batches_to_skip`."""
        ...

    def try_own_state(self) -> None:
        """Refuse what could not be saved of this replica."""
        ...

    def begin(
        self,
        fragments: Sequence[Fragment],
        count: Counters,
        *,
        restored: bool,
        catch_up: Callable[[], None],
    ) -> None:
        """Come to the same values as the others, after having joined them.

        Args:
            fragments: All of them.
            count: Is set to where the run stands.
            restored: Whether the model's values were loaded, so that they are compared, and not replaced.
            catch_up: Takes the syncs that were committed without this replica.
        """
        ...

    def behind(self) -> bool:
        """Whether there is a sync that this replica can take without contributing."""
        ...

    def begin_sync(self, fragment: Fragment, *, last: bool) -> Pending:
        """Begin the sync of a fragment.

        Args:
            fragment: Whose turn it is.
            last: This replica leaves afterwards, and can do without the sync.
        """
        ...

    def overtaken(self) -> None:
        """The run has counted steps of this rank that this life never took."""
        ...

    def save_own_state(self, inner_steps: int, *, leaving: bool = False) -> None:
        """Save what belongs to this replica alone, if it is time.

        Args:
            inner_steps: How many it has taken.
            leaving: It will not be asked again.
        """
        ...


def membership_of(
    exchange: Exchange,
    optimizers: Sequence[torch.optim.Optimizer],
    stateful: Mapping[str, Stateful],
    save_inner_every: int,
    names: Mapping[int, str],
) -> Membership:
    """How the replicas behind an exchange belong together. No other place asks of what kind an exchange is.

    Args:
        exchange: The connection to them.
        optimizers: The inner optimizers.
        stateful: What else belongs to this replica, by name.
        save_inner_every: Every how many syncs that is saved.
        names: The model's parameters by ``id``.

    Raises:
        ConfigurationError: Something cannot be saved; or nothing is ever saved in this kind of run, and something is given.
    """
    if isinstance(exchange, ResumableExchange):
        own = OwnState(optimizers, stateful, save_inner_every, names)
        return ResumableMembership(exchange, own)
    if stateful:
        raise ConfigurationError(
            "stateful= is for elastic runs: connect with min_replicas, or save and restore these objects yourself"
        )
    return FixedMembership(exchange)


class FixedMembership:
    """All replicas are there from the first sync to the last, and begin with rank 0's values."""

    resumable = False
    counted = 0
    batches_to_skip = 0

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    @property
    def position(self) -> Position:
        """Never asked for by a report of an exchange that keeps no state.

        Raises:
            SyncError: A report says that the model was reloaded.
        """
        raise SyncError(
            f"a report of this {type(self._exchange).__name__} says that the model was reloaded, but only an exchange that "
            "derives from ResumableExchange can say to which state. This is a bug in the exchange."
        )

    def try_own_state(self) -> None:
        """Nothing is saved."""

    def begin(
        self,
        fragments: Sequence[Fragment],
        count: Counters,
        *,
        restored: bool,
        catch_up: Callable[[], None],  # noqa: ARG002 - nobody comes late
    ) -> None:
        """Take rank 0's values, or see that all have the same."""
        for number, fragment in enumerate(fragments):
            fragment.begin()
            report = self._exchange.begin(Initial(fragment, into_model=not restored)).finish()
            fragment.finish()
            count.published[number] = report.sync

    def behind(self) -> bool:
        """Nothing is decided without this replica."""
        return False

    def begin_sync(self, fragment: Fragment, *, last: bool) -> Pending:  # noqa: ARG002
        """Begin a sync. It may always be the last one: another replica may have left before this one."""
        return self._exchange.begin(fragment, last=True)

    def overtaken(self) -> None:
        """Ranks have one life only."""

    def save_own_state(self, inner_steps: int, *, leaving: bool = False) -> None:
        """Nothing is saved."""


class ResumableMembership:
    """The run keeps the state. Replicas come and go, and what belongs to one alone is saved for its next life."""

    resumable = True

    def __init__(self, exchange: ResumableExchange, own: OwnState) -> None:
        self._exchange = exchange
        self._own = own

    @property
    def position(self) -> Position:
        """Where this replica stands in the run."""
        return self._exchange.position

    @property
    def counted(self) -> int:
        """How many inner steps of this rank the run has counted."""
        return self._exchange.counted

    @property
    def batches_to_skip(self) -> int:
        """Inner steps that the run has counted since what was restored had been saved."""
        return self._own.behind

    def try_own_state(self) -> None:
        """Refuse what could not be saved."""
        self._own.try_out()

    def begin(
        self,
        fragments: Sequence[Fragment],
        count: Counters,
        *,
        restored: bool,  # noqa: ARG002 - loading by hand is refused
        catch_up: Callable[[], None],
    ) -> None:
        """Take the run's newest state, and what an earlier life of this rank has saved."""
        for fragment in fragments:
            fragment.elastic = True
        position = self._exchange.restore(fragments)
        count.stand_at(position)
        count.inner_steps = position.inner_steps
        catch_up()
        count.inner_steps = self._exchange.counted  # also where it had to go back to older states
        self._own.restore(self._exchange, count.inner_steps)

    def behind(self) -> bool:
        """Whether a sync was committed without this replica."""
        return self._exchange.behind()

    def begin_sync(self, fragment: Fragment, *, last: bool) -> Pending:
        """Begin the sync of a fragment."""
        return self._exchange.begin(fragment, last=last)

    def overtaken(self) -> None:
        """Nothing is saved from now on: the data loader does not stand where the counted steps end."""
        self._own.overtaken = True

    def save_own_state(self, inner_steps: int, *, leaving: bool = False) -> None:
        """Save what belongs to this replica, if it is time."""
        self._own.save(self._exchange, inner_steps, leaving=leaving)
