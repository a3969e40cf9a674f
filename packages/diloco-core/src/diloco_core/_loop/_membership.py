"""What an outer loop does differently in fixed and in elastic runs. The kind of a run is decided once, when the loop is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from .._errors import ConfigurationError, SyncError
from .._exchange._resumable import ResumableExchange
from .._outer._initial import Initial
from .._terms._support import support_of
from . import _notices as notices
from ._open_steps import OpenSteps
from ._own_state import OwnState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from .._exchange._base import Exchange
    from .._exchange._pending import Pending
    from .._exchange._resumable import Position
    from .._inner._state import Stateful
    from .._outer._fragment import Fragment
    from ._counters import Counters
    from ._own_buffers import OwnBuffers
    from ._residuals import Residuals

SAVE_INNER_EVERY = 10


class Membership(Protocol):
    """What differs between runs in which all replicas stay to the end and runs that outlive their replicas.

    Attributes:
        resumable: Whether the run's store keeps the state, so that it is not saved and loaded by hand.
        resumes: Whether the state comes out of the run's store, and not out of this replica's model.
        begins_behind: Whether a sync may also be begun by another thread than the one that trains.
        in_background: How that thread is started; see :class:`.Timing`.
    """

    resumable: bool
    resumes: bool
    begins_behind: bool
    in_background: Callable[[Callable[[], object]], Callable[[float | None], bool]]

    @property
    def saves_open_steps(self) -> bool:
        """Whether inner steps that are in no sync are saved at the end, for a life that resumes the run."""
        ...

    @property
    def position(self) -> Position:
        """Where this replica stands in a run whose store keeps the state."""
        ...

    @property
    def counted(self) -> int:
        """How many inner steps the run has counted for this rank, in all of its lives; 0 if the run keeps no such count."""
        ...

    def counted_in(self, fragment: int) -> int | None:
        """How many inner steps of this rank are counted in a fragment; None if every contribution is counted."""
        ...

    @property
    def advice(self) -> str:
        """What to set so that less is lost between two saves, as the end of a message."""
        ...

    @property
    def batches_to_skip(self) -> int:
        """See :attr:`.DiLoCo.batches_to_skip`."""
        ...

    def try_own_state(self) -> None:
        """Check that everything that belongs to this replica alone can be saved.

        Raises:
            ConfigurationError: It names what cannot be saved.
        """
        ...

    def begin(
        self,
        fragments: Sequence[Fragment],
        count: Counters,
        *,
        restored: bool,
        catch_up: Callable[[], None],
    ) -> None:
        """Take the same values as the other replicas, after having joined them.

        Args:
            fragments: All fragments.
            count: This replica's counters; they are set to where the run stands.
            restored: Whether the model's values were loaded from a checkpoint: then they are compared, and not replaced.
            catch_up: Adopts the syncs that were committed without this replica.
        """
        ...

    def behind(self) -> bool:
        """Whether there is a sync that this replica can adopt without contributing."""
        ...

    def begin_sync(self, fragment: Fragment, sent_at: int, *, last: bool) -> Pending:
        """Begin the sync of a fragment.

        Args:
            fragment: The fragment whose turn it is.
            sent_at: How many inner steps this replica had taken when the contribution was taken from the model.
            last: Whether this replica leaves afterwards, so that the sync may be left out.
        """
        ...

    def give_up(self) -> None:
        """Make a sync that another thread carries out end soon; see :meth:`._base.Exchange.give_up`."""
        ...

    def hurry(self, hurried: bool) -> None:
        """Say that a sync that another thread carries out need not be decided; see :meth:`._base.Exchange.hurry`."""
        ...

    def overtaken(self) -> None:
        """Note that the run has counted steps of this rank that this life never took."""
        ...

    def save_own_state(self, inner_steps: int, overlap: int) -> None:
        """Save what belongs to this replica alone, if a save is due.

        Args:
            inner_steps: How many inner steps this replica has taken.
            overlap: How many of them it took while the sync was under way that it has just adopted. No sync counts these.
        """
        ...

    def save_loaded_state(self, inner_steps: int) -> None:
        """Save what belongs to this replica alone when it begins a run with a loaded outer loop."""
        ...

    def save_last(self, inner_steps: int) -> None:
        """Save what belongs to this replica alone, and nothing later: there will be no more syncs. Repeatable."""
        ...


def membership_of(
    exchange: Exchange,
    optimizers: Sequence[torch.optim.Optimizer],
    stateful: Mapping[str, Stateful],
    save_inner_every: int,
    names: Mapping[int, str],
    buffers: OwnBuffers | None,
    residuals: Residuals | None = None,
) -> Membership:
    """The membership of the run behind an exchange. Only this module asks what kind of exchange it is.

    Args:
        exchange: The connection to the other replicas.
        optimizers: The inner optimizers.
        stateful: Further objects that belong to this replica alone, by name.
        save_inner_every: The number of syncs from one save of this replica's own state to the next.
        names: The names of the model's parameters, by the ``id`` of the parameter.
        buffers: The model's buffers, if they are not synced.
        residuals: The residuals of error feedback, if there is any.

    Raises:
        ConfigurationError: Something cannot be saved; or ``stateful`` is given although a run of this kind saves nothing.
    """
    if isinstance(exchange, ResumableExchange):
        open_steps = None if exchange.support.takes_run else OpenSteps()
        own_state = OwnState(
            exchange,
            optimizers,
            stateful,
            save_inner_every,
            names,
            buffers,
            open_steps,
            residuals,
        )
        if open_steps is None:
            return ResumableMembership(exchange, own_state)
        return ReturningMembership(exchange, own_state, open_steps)
    if stateful:
        raise ConfigurationError(
            f"stateful was given (for {', '.join(map(repr, stateful))}), but this exchange ({type(exchange).__name__}) has no "
            "store that could keep their states. Use connect(), or leave stateful out and save and restore these objects "
            "yourself."
        )
    if save_inner_every not in {0, SAVE_INNER_EVERY}:
        raise ConfigurationError(
            f"save_inner_every={save_inner_every} cannot be used with {type(exchange).__name__}, which has no store to save "
            "anything in. Leave it out, or use connect()"
        )
    return FixedMembership(exchange)


class FixedMembership:
    """All replicas take part from the first sync to the last, and begin with rank 0's values."""

    resumable = False
    resumes = False
    saves_open_steps = False
    counted = 0

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        support = support_of(exchange)
        self.begins_behind, self.in_background = support.begins_behind, support.in_background

    @property
    def advice(self) -> str:
        """Empty: nothing is saved."""
        return ""

    @property
    def batches_to_skip(self) -> int:
        """0: a run that is not resumed has counted no steps before."""
        return 0

    def counted_in(self, fragment: int) -> int | None:  # noqa: ARG002
        """None: every contribution is counted."""
        return None

    @property
    def position(self) -> Position:
        """Not available: it is needed only after a reload, and this kind of exchange keeps no state to reload.

        Raises:
            SyncError: Always; a report has said that the model was reloaded.
        """
        raise SyncError(
            f"a report of this {type(self._exchange).__name__} says that the model was reloaded, but only an exchange that "
            "derives from ResumableExchange can tell which state it has loaded. This is a bug in the exchange."
        )

    def try_own_state(self) -> None:
        """Do nothing: nothing is saved."""

    def begin(
        self,
        fragments: Sequence[Fragment],
        count: Counters,
        *,
        restored: bool,
        catch_up: Callable[[], None],  # noqa: ARG002 - no replica joins late
    ) -> None:
        """Take rank 0's values, or check that all replicas have the same ones."""
        for number, fragment in enumerate(fragments):
            fragment.begin()
            fragment.rate = count.rate
            report = self._exchange.begin(Initial(fragment, into_model=not restored)).finish()
            fragment.finish()
            count.published[number] = report.sync

    def behind(self) -> bool:
        """Always false: no sync is decided without this replica."""
        return False

    def begin_sync(self, fragment: Fragment, sent_at: int, *, last: bool) -> Pending:  # noqa: ARG002
        """Begin a sync. Any sync may be the last one, since another replica may have left before it."""
        return self._exchange.begin(fragment, last=True)

    def give_up(self) -> None:
        """Make a sync that another thread carries out end soon."""
        self._exchange.give_up()

    def hurry(self, hurried: bool) -> None:
        """Do nothing: every sync is decided."""

    def overtaken(self) -> None:
        """Do nothing: nobody but this process takes steps for its rank while the run goes on."""

    def save_own_state(self, inner_steps: int, overlap: int) -> None:
        """Do nothing: nothing is saved."""

    def save_loaded_state(self, inner_steps: int) -> None:
        """Do nothing: nothing is saved."""

    def save_last(self, inner_steps: int) -> None:
        """Do nothing: nothing is saved."""


class _SavesOwnState:
    """What all runs have in common whose store keeps what belongs to one replica alone."""

    def __init__(self, own_state: OwnState) -> None:
        self._own_state = own_state

    @property
    def advice(self) -> str:
        """See :attr:`.OwnState.advice`."""
        return self._own_state.advice

    @property
    def batches_to_skip(self) -> int:
        """Inner steps that the run has counted after the restored inner state was saved."""
        return self._own_state.batches_to_skip()

    def try_own_state(self) -> None:
        """Check that this replica's own state can be saved."""
        self._own_state.try_out()

    def save_own_state(self, inner_steps: int, overlap: int) -> None:
        """Save what belongs to this replica alone, if a save is due."""
        self._own_state.save(inner_steps, overlap)

    def save_loaded_state(self, inner_steps: int) -> None:
        """Save what belongs to this replica alone when it begins a run with a loaded outer loop."""
        self._own_state.save_loaded(inner_steps)

    def save_last(self, inner_steps: int) -> None:
        """Save what belongs to this replica alone for the last time."""
        self._own_state.save_last(inner_steps)


class ResumableMembership(_SavesOwnState):
    """The run's store keeps the state. Replicas come and go; what belongs to one alone is saved for the next life of its rank."""

    resumable = True
    resumes = True
    saves_open_steps = False
    begins_behind = True

    def __init__(self, exchange: ResumableExchange, own_state: OwnState) -> None:
        super().__init__(own_state)
        self._exchange = exchange
        self.in_background = support_of(exchange).in_background

    @property
    def position(self) -> Position:
        """Where this replica stands in the run."""
        return self._exchange.position

    @property
    def counted(self) -> int:
        """How many inner steps the run has counted for this rank."""
        return self._exchange.counted

    def begin(
        self,
        fragments: Sequence[Fragment],
        count: Counters,
        *,
        restored: bool,  # noqa: ARG002 - elastic runs refuse load_state_dict()
        catch_up: Callable[[], None],
    ) -> None:
        """Take the run's newest state, and the inner state that an earlier life of this rank has saved."""
        self._own_state.residuals.watch(fragments)
        position = self._exchange.restore(fragments)
        count.stand_at(position)
        count.inner_steps = position.inner_steps
        catch_up()
        # Set it again: while catching up, the run may have gone back to older states, which count fewer steps.
        count.inner_steps = self._exchange.counted
        self._own_state.restore(count.inner_steps)
        position = self._exchange.position
        residuals = self._own_state.residuals
        residuals.take(self._exchange.saved_residuals(), self._exchange.rank, position.counted)
        residuals.check(self._exchange.rank, position.counted, position.sync)
        counted = zip(fragments, position.counted, strict=False)
        lost = [(f.name, count.inner_steps - steps) for f, steps in counted]
        # It may hold steps that were taken while a sync was under way, which no sync counts.
        count.inner_steps = max(count.inner_steps, self._own_state.restored_steps)
        notices.lost_between_fragments(self._exchange.rank, [few for few in lost if few[1] > 0])

    def counted_in(self, fragment: int) -> int | None:
        """How many inner steps of this rank are counted in a fragment."""
        return self._exchange.position.counted[fragment]

    def behind(self) -> bool:
        """Whether a sync was committed without this replica."""
        return self._exchange.behind()

    def begin_sync(self, fragment: Fragment, sent_at: int, *, last: bool) -> Pending:  # noqa: ARG002
        """Begin the sync of a fragment."""
        self._own_state.save_residual(fragment)
        return self._exchange.begin(fragment, last=last)

    def give_up(self) -> None:
        """Make a sync that another thread carries out end soon."""
        self._exchange.give_up()

    def hurry(self, hurried: bool) -> None:
        """Say that a sync that another thread carries out need not be decided."""
        self._exchange.hurry(hurried)

    def overtaken(self) -> None:
        """Save nothing from now on, because the data loader's position does not match the steps that the run has counted."""
        self._own_state.overtaken = True


class ReturningMembership(ResumableMembership):
    """All replicas take part in every sync. One that was started again goes on from what the run's store keeps."""

    resumable = False

    def __init__(
        self, exchange: ResumableExchange, own_state: OwnState, open_steps: OpenSteps
    ) -> None:
        super().__init__(exchange, own_state)
        self.resumes = exchange.resumes
        self._open_steps = open_steps

    @property
    def saves_open_steps(self) -> bool:  # type: ignore[override]
        """Whether they are saved with the inner state."""
        return self._own_state.saves

    def begin(
        self,
        fragments: Sequence[Fragment],
        count: Counters,
        *,
        restored: bool,
        catch_up: Callable[[], None],
    ) -> None:
        """Take the run's newest state, and the inner state and open steps that an earlier life of this rank has saved."""
        exchange, own = self._exchange, self._own_state
        self._open_steps.watch(fragments, count)
        own.residuals.watch(fragments)
        held = []
        if restored:
            for fragment in fragments:
                fragment.rate = count.rate
            # The model goes on in the middle of a period, and not from the global copy.
            held = [(each, each.detach().clone()) for each in _tensors(fragments)]
        position = exchange.restore(fragments, loaded=restored)
        if restored and not exchange.comes_back:
            with torch.no_grad():
                for tensor, values in held:
                    tensor.copy_(values)
            return
        count.stand_at(position)
        count.inner_steps = position.inner_steps
        catch_up()
        count.inner_steps = exchange.counted
        if not exchange.comes_back:
            return
        own.restore(count.inner_steps)
        position = exchange.position
        own.residuals.take(exchange.saved_residuals(), exchange.rank, position.counted)
        own.residuals.check(exchange.rank, position.counted, position.sync)
        self.resumes = True
        notices.resumed(exchange.rank, count.committed, count.inner_steps, own.behind, own.restored)
        if not self._open_steps.applied:
            counted = exchange.counted
            lost = [
                (fragment.name, counted - steps)
                for fragment, steps in zip(fragments, position.counted, strict=True)
                if steps < counted
            ]
            notices.open_steps_lost(exchange.rank, lost, own.saves, self.advice)

    def counted_in(self, fragment: int) -> int | None:
        """How many inner steps of this rank are counted in a fragment."""
        return self._exchange.position.counted[fragment]

    def begin_sync(self, fragment: Fragment, sent_at: int, *, last: bool) -> Pending:  # noqa: ARG002
        """Begin a sync. Any sync may be the last one, since another replica may have left before it."""
        return super().begin_sync(fragment, sent_at, last=True)


def _tensors(fragments: Iterable[Fragment]) -> Iterator[torch.Tensor]:
    """All tensors of the model that are synced."""
    return (named.tensor for fragment in fragments for named in fragment.followed())
