"""The state that belongs to one replica alone, with what a codec has lost of its contributions.

This says when it is saved in the run's store, and what a new incarnation of its rank gets back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._errors import CorruptedObjectError
from .._inner._state import InnerState, Stateful, TriedOut
from .._model._own_buffers import OwnBuffers
from .._outer._fragment import Fragment
from .._outer._residual import Residual
from .._run._exchange import StoreExchange
from . import _notices as notices
from ._counters import OpenSteps

# What is often in stateful, and does not know which batches were learned.
_NO_DATA = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)


def know_data(holders: Iterable[Stateful]) -> bool:
    """Say whether one of some objects may know which batches were learned."""
    return any(
        each.knows_data if isinstance(each, TriedOut) else not isinstance(each, _NO_DATA)
        for each in holders
    )


class Residuals:
    """The residuals of all fragments, as one object to save and restore; see :class:`.Stateful`.

    Not thread-safe.

    A restored residual holds only at the position at which it was saved, which :meth:`check` finds
    out. So nothing is sent twice, and what is lost is said.

    Args:
        advice: What to set so that less is lost, as the end of a message.
    """

    def __init__(self, advice: str = "") -> None:
        self._advice = advice
        self._pairs: Sequence[tuple[Fragment, Residual]] = ()

    def watch(self, fragments: Sequence[Fragment]) -> None:
        """Save and restore the residuals of these fragments from now on."""
        self._pairs = [(each, each.residual) for each in fragments if each.residual is not None]

    def state_dict(self) -> dict[str, Any]:
        """For every fragment, by name, its residual and the position at which it holds."""
        return {
            fragment.name: {"tag": residual.tag, "values": list(residual.values)}
            for fragment, residual in self._pairs
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with saved residuals, as far as they hold."""
        for fragment, residual in self._pairs:
            saved = state[fragment.name]
            residual.load(saved["values"], int(saved["tag"]))

    def check(self, rank: int, positions: Sequence[int], sync: int) -> None:
        """Set residuals to zero that do not hold where this replica begins, and log which ones.

        Args:
            rank: The rank of this replica.
            positions: For every fragment, how many inner steps of this rank are counted in it.
            sync: The number of the newest sync.
        """
        pairs = zip(self._pairs, positions, strict=bool(self._pairs))
        for (fragment, residual), position in pairs:
            if residual.move(position):
                lost = (fragment.name, sync, self._advice)
                notices.log.warning(notices.RESIDUAL_LOST, rank, *lost)


@dataclass(eq=False)
class OwnState:
    """The saved inner optimizers, random generators, and further objects that the user names.

    This class saves and restores them. Not thread-safe.

    Args:
        exchange: The connection to the run, in whose store the state is saved.
        optimizers: The inner optimizers.
        stateful: Further objects to save, by name.
        every: The number of syncs from one save to the next, the first of which comes at the first
            sync; 0 for never.
        names: The names of the model's parameters, by the ``id`` of the parameter.
        buffers: The model's buffers, if they belong to this replica alone.
        open_steps: In fixed runs: what the replica has learned in fragments since their last sync.
        feedback: Whether there is error feedback, so that what codecs have lost of its
            contributions is saved, too.

    Attributes:
        advice: What to set so that less is lost between two saves, as the end of a message; empty
            if it is set.
        residuals: The residuals of error feedback; of no fragments without error feedback.
        restored: Whether a saved state was restored.
        restored_steps: The rank's inner steps when the state was saved; 0 if none was restored.
        behind: Inner steps that the run has counted after the restored state was saved (all of them
            if none was restored).
        overtaken: Whether the run has counted steps of this rank that this incarnation never took,
            so that the position of its data loader does not match the counted steps. Nothing is
            saved from then on: the next incarnation of the rank restores what was saved before, and
            skips the batches of the steps that were counted since.

    Raises:
        ConfigurationError: Something cannot be saved.
    """

    exchange: StoreExchange
    optimizers: Sequence[torch.optim.Optimizer]
    stateful: Mapping[str, Stateful]
    every: int
    names: Mapping[int, str]
    buffers: OwnBuffers | None
    open_steps: OpenSteps | None
    feedback: bool

    def __post_init__(self) -> None:
        self.restored = self.overtaken = False
        self.restored_steps = self.behind = 0
        self.advice = "" if self.every == 1 else " save_inner_every=1 avoids this."
        self.residuals = Residuals(self.advice)
        residuals = self.residuals if self.feedback else None
        own = {"buffers": self.buffers, "open_steps": self.open_steps, "residuals": residuals}
        given = {name: holder for name, holder in own.items() if holder is not None}
        layout = self.exchange.layout
        self._inner = InnerState(self.optimizers, self.stateful, self.names, given, layout)
        self._untold = 0
        self._saved_at = self._saved_steps = self._began_at = 0
        self._over = self._has_saved = False

    @property
    def saves(self) -> bool:
        """Say whether anything is saved from now on."""
        return bool(self.every) and not self.overtaken

    def batches_to_skip(self) -> int:
        """Return what a data loader has to skip if its position was restored.

        Warns once if nothing was restored that could be a loader.

        A loop that takes batch number ``inner_steps`` does not ask, and is not bothered.
        """
        untold, self._untold = self._untold, 0
        if untold:
            notices.log.warning(
                notices.LOADER_NOT_RESTORED, self.exchange.rank, self.behind, untold
            )
        return self.behind

    def try_out(self) -> None:
        """Check that everything can be saved as it is now, so that no problem shows only later.

        Raises:
            ConfigurationError: It names what cannot be saved.
        """
        if self.every:
            self._inner.try_out()

    def restore(self, inner_steps: int) -> None:
        """Restore the newest state of an earlier incarnation that the run has not given up."""
        exchange, rank, log = self.exchange, self.exchange.rank, notices.log
        self.behind = inner_steps
        self._saved_at = exchange.position.sync
        self._saved_steps = self._began_at = inner_steps
        passed_over = False
        for saved in exchange.saved_inner() if self.every else ():
            try:
                if exchange.given_up(saved):
                    log.warning(notices.INNER_STATE_GIVEN_UP, rank, saved.origin, saved.sync)
                    passed_over = True
                    continue
                steps = self._inner.restore(saved.data, saved.identity, saved.origin)
            except CorruptedObjectError as error:
                notices.log.error("rank %d: %s", rank, error)
                passed_over = True
                continue
            self.restored = True
            self.restored_steps = steps
            self.behind = max(0, inner_steps - steps)
            self._has_saved = not self.behind
            self._untold = 0 if know_data(self.stateful.values()) else steps
            if self.open_steps is not None and saved.sync == exchange.position.sync:
                self.open_steps.apply(steps)
                self._saved_steps = self._began_at = steps
            if self._inner.overwritten:
                log.warning(notices.SAVED_SETTINGS, rank, "; ".join(self._inner.overwritten))
            if passed_over:
                log.warning(notices.OLDER_INNER_STATE, rank, saved.sync, self.behind)
            elif self.behind:
                level = logging.INFO if self.open_steps is None else logging.WARNING
                given = (saved.sync, self.behind, self._contents(), self.advice)
                log.log(level, notices.INNER_STATE_BEHIND, rank, *given)
            return
        if passed_over or self.behind:
            level = logging.WARNING
            why = "" if passed_over else ", because the store holds no inner state of this rank"
            if not self.every:
                why = ", because nothing is saved or restored with save_inner_every=0"
                # The user has asked for that, but may not know that it concerns the model, too.
                level = logging.WARNING if self.buffers else logging.INFO
            contents = self._contents()
            if any(optimizer.state for optimizer in self.optimizers):
                contents = contents.replace(
                    "The optimizers, ", "The optimizers keep the state that they were given; "
                )
            log.log(level, notices.FRESH_INNER_STATE, rank, why, contents, self.behind)

    def _contents(self) -> str:
        """Return what is saved, as the beginning of a sentence."""
        buffers = "the buffers (buffers='none'), " if self.buffers else ""
        return f"The optimizers, {buffers}the random generators and the objects in stateful"

    def save(self, inner_steps: int, overlap: int) -> None:
        """Save the state if a save is due and all inner steps are counted.

        Steps that are not counted yet may never be.

        Args:
            inner_steps: How many inner steps this replica has taken.
            overlap: How many of them no sync will ever count; see
                :meth:`.Membership.save_own_state`.
        """
        position = self.exchange.position
        counted = position.inner_steps >= inner_steps - overlap
        due = position.sync - self._saved_at >= self.every or not self._has_saved
        if due and counted:
            self._save(inner_steps)

    def save_last(self, inner_steps: int) -> None:
        """Save the state if it may have changed since the last save, and nothing later. Repeatable.

        In an elastic run steps that are not counted are lost, and nothing is saved that holds them.
        In a fixed run they are saved with the values that they led to, so that a resumed run goes
        on with them.
        """
        position = self.exchange.position
        changed = (position.sync, inner_steps) != (self._saved_at, self._saved_steps)
        # The last save was made inside step(): a scheduler, say, may have been stepped since.
        changed |= bool(self.stateful) and inner_steps != self._began_at
        counted = position.inner_steps >= inner_steps
        if changed and (counted or self.open_steps is not None) and not self._over:
            self._save(inner_steps)
        self._over = True

    def save_loaded(self, inner_steps: int) -> None:
        """Save the state with which a run begins that goes on from a loaded outer loop."""
        self._began_at = inner_steps
        self._save(inner_steps)

    def _save(self, inner_steps: int) -> None:
        if not self.saves:
            return
        position = self.exchange.position
        self.exchange.save_inner(
            lambda identity: self._inner.parts(inner_steps, identity, position.rollback)
        )
        self._saved_at, self._saved_steps = position.sync, inner_steps
        self._has_saved = True


class NothingSaved:
    """The stand-in for :class:`OwnState` where the exchange has no store and nothing is saved."""

    saves = overtaken = False
    advice = ""

    def batches_to_skip(self) -> int:
        """None: inner steps are counted by this replica alone."""
        return 0

    def try_out(self) -> None:
        """Do nothing."""

    def save(self, inner_steps: int, overlap: int) -> None:
        """Do nothing."""

    def save_loaded(self, inner_steps: int) -> None:
        """Do nothing."""

    def save_last(self, inner_steps: int) -> None:
        """Do nothing."""
