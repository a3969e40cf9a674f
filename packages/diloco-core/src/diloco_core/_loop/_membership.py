"""What an outer loop does differently in fixed and in elastic runs.

The kind of a run is decided once, when the loop is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from .._errors import ConfigurationError, SyncError
from .._exchange._base import Exchange
from .._exchange._resumable import Position
from .._inner._state import Stateful
from .._model._own_buffers import OwnBuffers
from .._outer._fragment import Fragment
from .._outer._initial import Initial
from .._run._exchange import StoreExchange
from .._terms._support import support_of
from . import _notices as notices
from ._counters import Counters, OpenSteps
from ._own_state import NothingSaved, OwnState

CatchUp: TypeAlias = Callable[[], None]

SAVE_INNER_EVERY = 10


def membership_of(
    exchange: Exchange,
    optimizers: Sequence[torch.optim.Optimizer],
    stateful: Mapping[str, Stateful],
    save_inner_every: int,
    names: Mapping[int, str],
    buffers: OwnBuffers | None,
    feedback: bool,
) -> Membership:
    """The membership of the run behind an exchange.

    Only this module asks what kind of exchange it is.

    Args:
        exchange: The connection to the other replicas.
        optimizers: The inner optimizers.
        stateful: Further objects that belong to this replica alone, by name.
        save_inner_every: The number of syncs from one save of this replica's own state to the next.
        names: The names of the model's parameters, by the ``id`` of the parameter.
        buffers: The model's buffers, if they are not synced.
        feedback: Whether there is error feedback.

    Raises:
        ConfigurationError: Something cannot be saved; or ``stateful`` is given although nothing
            will be saved.
    """
    if isinstance(exchange, StoreExchange):
        check_stateful(stateful, save_inner_every)
        open_steps = None if exchange.support.takes_run else OpenSteps()
        given = (optimizers, stateful, save_inner_every, names, buffers, open_steps, feedback)
        return StoreMembership(exchange, OwnState(exchange, *given), open_steps)
    if stateful:
        raise ConfigurationError(
            f"stateful was given (for {', '.join(map(repr, stateful))}), but this exchange "
            f"({type(exchange).__name__}) has no store that could keep their states. Use "
            "connect(), or leave stateful out and save and restore these objects yourself."
        )
    if save_inner_every not in {0, SAVE_INNER_EVERY}:
        raise ConfigurationError(
            f"save_inner_every={save_inner_every} cannot be used with {type(exchange).__name__}, "
            "which has no store to save anything in. Leave it out, or use connect()"
        )
    return Membership(exchange)


def check_stateful(stateful: Mapping[str, Stateful], save_inner_every: int) -> None:
    """Refuse objects to save where nothing is saved."""
    if stateful and not save_inner_every:
        raise ConfigurationError(
            f"stateful was given (for {', '.join(map(repr, stateful))}), but nothing is saved "
            "or restored with save_inner_every=0. Leave stateful out, or let save_inner_every "
            "be at least 1"
        )


class Membership:
    """A run without a store, in which nothing is saved.

    All replicas begin with rank 0's values and take part in every sync.

    Attributes:
        exchange: The connection to the other replicas.
        support: What it can do.
        elastic: Whether replicas come and go, and always take the state of the run, and not that of
            their own model.
        resumes: Whether the state comes from the run's store, and not from this replica's model.
        own: Saves and restores what belongs to this replica alone.
    """

    elastic = False
    resumes = False

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.own: OwnState | NothingSaved = NothingSaved()
        self.support = support_of(exchange)

    @property
    def position(self) -> Position:
        """Return where this replica stands in a run whose store keeps the state.

        Raises:
            SyncError: There is no such store, but a report has said that the model was reloaded.
        """
        raise SyncError(
            f"a report of this {type(self.exchange).__name__} says that the model was reloaded, "
            "but only a StoreExchange can tell which state it has loaded. This is a bug in the "
            "exchange."
        )

    @property
    def counted(self) -> int:
        """The inner steps that the run has counted for this rank in all its incarnations.

        The number is 0 if the run keeps no such count.
        """
        return 0

    def counted_in(self, fragment: int) -> int | None:  # noqa: ARG002
        """Return how many inner steps of this rank are counted in a fragment.

        None if every contribution is counted.
        """
        return None

    def begin(
        self,
        fragments: Sequence[Fragment],
        count: Counters,
        *,
        restored: bool,
        catch_up: CatchUp,  # noqa: ARG002
    ) -> None:
        """Take the same values as the other replicas, after having joined them.

        Args:
            fragments: All fragments.
            count: This replica's counters; they are set to where the run stands.
            restored: Whether the model's values were loaded from a checkpoint: then they are
                compared, and not replaced.
            catch_up: Adopts the syncs that were committed without this replica.
        """
        for fragment in fragments:
            fragment.begin()
            fragment.rate = count.rate
            self.exchange.begin(Initial(fragment, into_model=not restored)).finish()
            fragment.finish()

    def behind(self) -> bool:
        """Say whether there is a sync that this replica can adopt without contributing."""
        return False


class StoreMembership(Membership):
    """A run with a store, which keeps the state.

    What belongs to one replica alone is saved for the next incarnation of its rank.

    Args:
        exchange: The connection to the run.
        own_state: Saves and restores what belongs to this replica alone.
        open_steps: In fixed runs, what it has learned in fragments since their last sync. None in
            elastic runs.
    """

    exchange: StoreExchange
    own: OwnState

    def __init__(
        self, exchange: StoreExchange, own_state: OwnState, open_steps: OpenSteps | None
    ) -> None:
        super().__init__(exchange)
        self.own = own_state
        self._open_steps = open_steps
        self.elastic = open_steps is None
        self.resumes = self.elastic or exchange.resumes

    @property
    def position(self) -> Position:
        """Return where this replica stands in the run."""
        return self.exchange.position

    @property
    def counted(self) -> int:
        """Return how many inner steps the run has counted for this rank."""
        return self.exchange.counted

    def counted_in(self, fragment: int) -> int | None:
        """Return how many inner steps of this rank are counted in a fragment."""
        return self.exchange.position.counted[fragment]

    def begin(
        self, fragments: Sequence[Fragment], count: Counters, *, restored: bool, catch_up: CatchUp
    ) -> None:
        """Take the run's newest state, and what an earlier incarnation of this rank has saved."""
        exchange, own = self.exchange, self.own
        own.residuals.watch(fragments)
        if self._open_steps is not None:
            self._open_steps.watch(fragments, count)
        held = []
        if restored:
            for fragment in fragments:
                fragment.rate = count.rate
            # The model goes on in the middle of a period, and not from the global copy.
            tensors = (named.tensor for each in fragments for named in each.followed())
            held = [(tensor, tensor.detach().clone()) for tensor in tensors]
        position = exchange.restore(fragments, loaded=restored)
        if restored and not exchange.comes_back:
            with torch.no_grad():
                for tensor, values in held:
                    tensor.copy_(values)
            return
        count.stand_at(position)
        count.inner_steps = position.inner_steps
        catch_up()
        # Set it again: while catching up, the run may have gone back to states with fewer steps.
        count.inner_steps = counted = exchange.counted
        if not (self.elastic or exchange.comes_back):
            return
        own.restore(counted)
        position = exchange.position
        own.residuals.check(exchange.rank, position.counted, position.sync)
        lost = ", ".join(
            f"{counted - steps} of fragment {fragment.name}"
            for fragment, steps in zip(fragments, position.counted, strict=False)
            if steps < counted
        )
        if self._open_steps is None:
            # It may hold steps that were taken while a sync was under way, which no sync counts.
            count.inner_steps = max(counted, own.restored_steps)
            if lost:
                notices.log.warning(notices.LOST_BETWEEN_FRAGMENTS, exchange.rank, lost)
            return
        self.resumes = True
        notices.log.info(notices.RESUMED, exchange.rank, count.committed, count.inner_steps)
        if lost and not self._open_steps.applied:
            why = notices.BETWEEN_TWO_SAVES if own.saves else notices.NOTHING_IS_SAVED
            notices.log.warning(notices.OPEN_STEPS_LOST, exchange.rank, lost, why, own.advice)

    def behind(self) -> bool:
        """Say whether a sync was committed without this replica."""
        return self.exchange.behind()
