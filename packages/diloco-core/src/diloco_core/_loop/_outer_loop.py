"""An outer loop around a training loop: it is entered, syncs, is saved and loaded, and is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch

from .._errors import ConfigurationError, SyncError, UnseenStepsError
from .._exchange._base import Exchange, Schema
from .._exchange._report import SyncReport
from .._exchange._telemetry import Logged, Telemetry
from .._inner._kept_weights import KeptWeights
from .._inner._own_weights import OwnWeights
from .._inner._steps import StepCounter
from .._inner._unseen_changes import UnseenChanges
from .._model._loads import Loads
from .._model._place import Place
from .._seconds import Seconds
from . import _notices as notices
from ._arguments import check_not_entered, tokens_counted
from ._counters import Counters
from ._global_model import GlobalModel
from ._inner_loop import InnerLoop, TrainingProcess
from ._membership import Membership
from ._outer_lr import OuterLr, check_changeable
from ._outer_steps import OuterSteps
from ._synced_model import SavedState, SyncedModel


class OuterLoop:
    """The block in which a replica trains; :class:`DiLoCo` describes it. Not thread-safe.

    Args:
        model: The fragments of the model, with the inner optimizers, the exchange and the terms.
        membership: The membership of the run.
        names: The names of the model's parameters, by the ``id`` of the parameter.
        on_sync: Called after every sync with its report, or None.
    """

    def __init__(
        self,
        model: SyncedModel,
        membership: Membership,
        names: Mapping[int, str],
        on_sync: Callable[[SyncReport], None] | None,
    ) -> None:
        exchange, optimizers, terms = model.exchange, model.optimizers, model.terms
        self._exchange = exchange
        self._model = model
        self._membership = membership
        self._terms = terms
        schedules = [group.schedule for group in terms.groups]
        self._lr = OuterLr(model.outer.rates, schedules, exchange.rank)
        self._fragments = model.fragments
        self._process = TrainingProcess()
        self._is_open = False
        self._inner_steps_before = 0
        self._schedule = terms.schedule
        self._unseen = UnseenChanges(model.trained, self._schedule.steps)
        self._kept = KeptWeights(optimizers, names)
        self._own_weights = OwnWeights(optimizers, names)
        self._loads = Loads(model.model, model.trained)
        self._count = count = Counters([0] * len(model.fragments), StepCounter(len(optimizers)))
        self._on_sync = on_sync
        self._telemetry: Telemetry | None = getattr(exchange, "telemetry", None)
        self._logged = Logged()
        if self._telemetry is not None:
            self._logged, process = self._telemetry.logged, self._process
            self._telemetry.steps = lambda: count.inner_steps
            self._telemetry.committed = lambda: count.committed
            self._telemetry.training = lambda: process.training
        self._outer_steps = OuterSteps(
            self._fragments,
            self._count,
            self._schedule,
            membership,
            self._lr,
            before=self._check_before_sync,
            adopted=self._note_sync,
            on_sync=self._told,
        )
        self._saved = SavedState(model, self._count)
        self._place = Place(model.synced, model.held, exchange)
        synced = lambda: (each.tensor for each in model.followed())  # noqa: E731
        self._global_model = GlobalModel(synced, model.put_committed, model.check, self._loads)
        guards = (self._unseen, self._kept, self._loads, self._global_model)
        self._inner = InnerLoop(optimizers, self._outer_steps, *guards, self._process)
        self._watch_steps(self._place.check)

    @property
    def exchange(self) -> Exchange:
        """The connection to the other replicas."""
        return self._exchange

    @property
    def sync_every(self) -> int | Seconds:
        """Inner steps, or seconds, between two syncs of the same fragment."""
        return self._schedule.sync_every

    @property
    def committed(self) -> int:
        """Outer steps that the model has taken so far.

        After an elastic run has returned to an older state (``resume="newest-whole"``), the number
        is smaller than before: the syncs that were given up are not in the model and do not count.
        The log in the store continues its numbering, with higher numbers than this from then on.
        """
        return self._count.committed

    @property
    def inner_steps(self) -> int:
        """Inner steps taken so far."""
        return self._count.inner_steps

    @property
    def syncing(self) -> bool:
        """Say whether a sync is under way while this replica trains (``delay``)."""
        return self._outer_steps.under_way

    @property
    def batches_to_skip(self) -> int:
        """The inner steps of this rank that the run had counted beyond the restored inner state.

        A data loader that was restored with that state (because it is in ``stateful``) has to skip
        this many batches, or they would be learned twice. If a state was restored and ``stateful``
        holds no loader, reading this logs a warning (once). If no state was restored, this is the
        number of all inner steps that the run had counted for this rank: 0 in a rank's first
        incarnation. A saved state is not restored if it is damaged, or if the run has given up the
        syncs before it; the data loader then starts from the beginning.

        It counts inner steps: with k micro-batches in a step, skip k times as many. Steps that a
        gradient scaler skips are not counted, although they take a batch: save the loader after
        every sync then (``stateful``, ``save_inner_every=1``), or count the batches yourself.

        The number describes the start of this incarnation and does not change. A contribution that
        an earlier incarnation sent may be counted later; :attr:`SyncReport.batches_to_skip` reports
        that. A loop that always takes batch number :attr:`inner_steps` needs neither.
        """
        return self._membership.own.batches_to_skip()

    def __enter__(self) -> Self:
        check_not_entered(self._inner.entered)
        self._process.remember()
        # Outside the try block below: if this loop is refused because another one is in use, both
        # may have the same exchange, which must not be aborted.
        self._watch_steps(self._place.take)
        try:
            self._process.watch()
            self._model.check()
            self._membership.own.try_out()
            if self._saved.loaded:
                self._saved.check_model()
            else:
                for fragment in self._fragments:
                    fragment.take_snapshot()
            self._exchange.join(self._schema())
            self._outer_steps.begin(restored=bool(self._saved.loaded))
            if self._saved.loaded:
                self._membership.own.save_loaded(self.inner_steps)
        except BaseException as error:
            self._stop()
            self._process.stop()
            self._exchange.abort(error)
            raise
        self._inner_steps_before = self.inner_steps
        self._outer_steps.training = True
        self._inner.enter()
        self._unseen.watch()
        self._loads.watch()
        self._process.training = True
        self._is_open = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._process.is_fork():
            # The parent continues the run: the child must not tell the other replicas anything, and
            # its errors are its own.
            if error is None:
                self._process.check()
            return
        try:
            self._leave(error)
        finally:
            self._is_open = False
            self._loads.stop()
            self._process.stop()

    def _leave(self, error: BaseException | None) -> None:
        self._stop()
        if error is not None:
            self._outer_steps.give_up()
            self._exchange.abort(error)
            return
        try:
            self._global_model.refuse("the end of the block of DiLoCo")
            self._unseen.check()
            self._model.check_frozen()
            if self._terms.flush == "partial":
                self.flush()
                if any(self._count.since_sync):
                    # Too few replicas were left to sync them: they would be in this replica's model
                    # alone.
                    lost = (max(self._count.since_sync), self.committed)
                    notices.log.warning(notices.LEFT_OUT, self._exchange.rank, *lost)
                    self._outer_steps.drop_open_steps()
            else:
                self._check_whole()
                self._inner.end_step()
                self._model.check()
                self._check_loads()  # open steps are saved for a run that is resumed
                if self._outer_steps.under_way:
                    self._sync_last()
                self._outer_steps.catch_up()
                taken = self.inner_steps - self._inner_steps_before
                if taken and self._count.since_event >= taken:
                    saved = self._membership.own.saves and not self._membership.elastic
                    became = notices.STEPS_ARE_SAVED if saved else notices.STEPS_ARE_LOST
                    given = (taken, self._schedule.length, became)
                    notices.log.warning(notices.LEFT_BEFORE_A_SYNC, self._exchange.rank, *given)
                # Before the steps are dropped: if a fixed run is resumed, this replica goes on with
                # them.
                self._membership.own.save_last(self.inner_steps)
                self._outer_steps.drop_open_steps()
            self._settle()
        except BaseException as late:
            self._outer_steps.give_up()
            self._exchange.abort(late)
            raise
        self._lr.end()
        if self.inner_steps == self._inner_steps_before:
            rank = self._exchange.rank
            if self._membership.resumes:
                notices.log.warning(notices.LEFT_A_RUN_WITHOUT_A_STEP, rank, self.committed)
            else:
                notices.log.warning(notices.LEFT_WITHOUT_A_STEP, rank)
        self._membership.own.save_last(self.inner_steps)
        self._exchange.leave()
        notices.log.info(notices.DONE, self._exchange.rank, self.committed, self.inner_steps)

    def set_outer_lr(self, value: float, *, group: int | None = None) -> None:
        """Change the outer learning rate of the running run, from any replica.

        It changes for one outer parameter group, or for all if ``group`` is left out.

        The wish travels with this replica's next contribution, and holds from the sync on that
        takes it: for all replicas, all fragments, and whoever continues the run. It takes the place
        of the ``outer_lr`` that the loop was made with, also if that is a function. A sync that is
        under way keeps its rate. If several replicas ask at the same time, the one with the
        greatest rank is heard, and the others log a warning. :attr:`SyncReport.outer_lr` says which
        rate a sync has used. If this process dies before the next sync, nothing was changed;
        calling it on several replicas with the same value does no harm. If a run goes back to an
        older state, it goes back to the rate of that state.

        Args:
            value: The new learning rate; a number above 0.
            group: The number of the group in ``outer_groups`` whose rate is changed; all groups if
                left out. A change fixes the rates of all groups, so if another group's rate is a
                function, this is refused.

        Raises:
            ConfigurationError: The value or the group is not allowed; the outer optimizer has no
                learning rate; or the exchange cannot tell the others (:class:`ManagerExchange`).
            SyncError: The block has not been entered, or was left; or an earlier sync has failed.
        """
        if not self._is_open:
            raise SyncError(
                "set_outer_lr() changes the learning rate of a running run, and can only be called "
                "inside the block (`with DiLoCo(...) as outer:`). For a run that is about to "
                "begin, pass outer_lr to DiLoCo(...)."
            )
        self._check_whole()
        check_changeable(self._exchange)
        self._model.outer.check_changeable("set_outer_lr() was called")
        self._lr.ask(value, group)

    def count_tokens(self, n: int) -> None:
        """Say how many tokens the next inner step learns from; only with ``weight="tokens"``.

        Call it before every ``inner_optimizer.step()``, or before some of them with the sum: a sync
        inside ``step()`` weighs this replica's contribution by what was counted before. Whatever
        becomes of a contribution becomes of its tokens: if it is carried into the next sync, so are
        they. What is counted after the last step before a sync belongs to the next one.

        Raises:
            ConfigurationError: ``n`` is not a whole number of at least 0, or contributions are not
                weighed by tokens.
            SyncError: The block has not been entered.
        """
        tokens = tokens_counted(self._terms.weighting, n, max(self._count.tokens))
        if not self._inner.entered:
            raise SyncError(
                "count_tokens() was called before the block was entered: inner steps and their "
                "tokens count inside the block (with DiLoCo(...) as outer: ...)"
            )
        self._count.tokens = [before + tokens for before in self._count.tokens]

    def log(self, **metrics: float | str) -> None:
        """Say how the training goes, such as ``log(loss=loss.item(), tokens=n)``.

        The values are numbers or short texts, of at most 32 names. Whoever watches the run sees the
        last ones, and the history of the run has those that were logged since the sync before
        (:func:`connect`, ``telemetry``). Nothing else is done with them. NaN and infinities are
        written as text.

        Nothing is sent here: it takes a few microseconds. Over a replica of several processes, what
        process 0 logs is written, and what the others log is not. Without a store, and with
        ``telemetry=False``, nothing is written.

        Raises:
            ConfigurationError: A name or a value is not allowed; the error names it.
            SyncError: The block has not been entered, or was left.
        """
        if not self._is_open:
            raise SyncError("log() can only be called inside the block (`with DiLoCo(...)`)")
        self._logged.take(metrics)

    def _told(self, report: SyncReport) -> None:
        """Pass a report on to the program, and then to telemetry, with what that has logged."""
        if self._on_sync is not None:
            self._on_sync(report)
        if self._telemetry is not None:
            self._telemetry.synced(report)

    def flush(self) -> list[SyncReport]:
        """Sync every fragment that has inner steps since its last sync, so that nothing is lost.

        All replicas must call it at the same point; leaving the ``with`` block does so. It is a
        full outer step, however few inner steps it covers. In elastic runs a sync is left out if
        too few replicas are left for it. In fixed runs, if another replica has left after fewer
        syncs (it took fewer steps, for example because its gradient scaler skipped some), the
        unsynced steps of this replica are dropped with a warning: all replicas end in the last
        committed state. Returns the reports.
        """
        self._check_whole()
        self._global_model.refuse("flush()")
        self._inner.end_step()
        self._model.check()
        reports = self._sync_last() if self._outer_steps.under_way else []
        # In turn, including a fragment without unsynced steps (its last sync was refused): the
        # others come after it.
        for _ in self._fragments:
            if not any(self._count.since_sync):
                break
            reports += (latest := self._sync_last())
            if not latest or not latest[0].committed:
                break
        return reports

    def _sync_last(self) -> list[SyncReport]:
        """Sync as a replica that leaves.

        Returns the report; none if another replica has left before.
        """
        report = self._outer_steps.sync(last=True)
        return [] if report is None else [report]

    def state_dict(self) -> dict[str, Any]:
        """Return the outer loop's state on this replica.

        It is the counters, the global copy, and the outer state of the replica's own shards.

        The values are references, as in ``torch.nn.Module.state_dict``: write them to a file at
        once, or copy them. The state holds a digest of the values: values that have changed since
        are refused when they are loaded.

        Save it with the model's and the inner optimizer's state, on every replica, and on all
        replicas after the same outer step. If gradient scalers skip steps, choose the moment by
        :attr:`committed` (for example in ``on_sync``), not by the number of batches.
        :meth:`load_state_dict` needs the same rank and world size. To continue a run on its own
        prefix, this is not needed: the store holds the state (``resume=True`` in :func:`connect`;
        elastic runs always use it).

        Raises:
            SyncError: There is no state yet, because the block has not been entered; the state is
                undefined, because a sync has failed; or a sync is under way (:attr:`syncing`), so
                that the state is not complete.
            ModelChangedError: The model no longer holds the tensors that are synced.
        """
        self._check_settled("state_dict()")
        self._global_model.refuse("state_dict()")
        return self._saved.of()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Call it before entering the block, after loading the model and the inner optimizer.

        The replicas meet on a fresh prefix and refuse each other if their global copies differ.
        ``sync_every`` may differ from before if it is the same on all replicas: a period that is
        over is synced after the next step. When the block is entered, the model must hold the same
        values as when the state was saved.

        Raises:
            ConfigurationError: The state was saved by another rank, world size, version or model,
                or with other settings (the message names them); or the exchange is elastic, or
                resumes a run.
            SyncError: The block has been entered already.
        """
        if self._inner.entered:
            raise SyncError("load_state_dict() must be called before the block is entered")
        if self._membership.elastic:
            raise ConfigurationError(
                "an elastic run is resumed from its store, not by load_state_dict(): connect to "
                "its prefix without this call"
            )
        if self._membership.resumes:
            raise ConfigurationError(
                "load_state_dict() cannot be used together with resume=: the run is continued from "
                "what its store holds. Leave this call out, or begin a new run with the loaded "
                "state: on another prefix, without resume=."
            )
        self._saved.load(state)

    @contextmanager
    def global_model(self) -> Iterator[None]:
        """Put the last committed values into the model, as long as a ``with`` block lasts.

        ``with outer.global_model(): evaluate(model)``. Between two syncs every replica has a model
        of its own; inside the block it has the one that all have, and at the end of the block its
        own values again, to the bit, also after an error. They are kept on the CPU meanwhile. The
        synced buffers are committed values, too. Gradients stay as they are. What is trained or
        loaded inside is lost.

        Elastic replicas may have adopted different syncs. With several fragments, each has the
        values of its own last sync. Where several processes are one replica, all of them enter it
        together, inside the block of the outer loop.

        Raises:
            SyncError: The block of the outer loop has not been entered; a sync has failed; a sync
                is under way (:attr:`syncing`), so that the values are not complete; or the block of
                this method has been entered already. Inside it, a step of the inner optimizer,
                :meth:`flush`, :meth:`state_dict` and the end of the outer loop's block raise it.
            ModelChangedError: The model no longer holds the tensors that are synced.
        """
        self._check_settled("global_model()")
        with self._global_model.in_place():
            yield

    def global_state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of the last committed values, without touching the model.

        They are on the CPU, in the model's dtypes and under the names of a plain model, so that its
        ``load_state_dict`` takes them (what modules or hooks add to a state is not there). What is
        not synced is as in this replica's model: frozen parameters, and buffers under
        ``buffers="none"``. Right after a sync, :func:`export` writes the same values.

        Where several processes are one replica, all of them call it, inside the block; process 0
        gets the values, and the others an empty dict.

        Raises:
            SyncError: As :meth:`global_model` does; but it may be called inside that block.
            ModelChangedError: The model no longer holds the tensors that are synced.
        """
        self._check_settled("global_state_dict()")
        return self._model.committed_copies()

    def _check_settled(self, call: str) -> None:
        """Refuse a call that needs the committed values while there are none that are whole."""
        if not (self._inner.entered or self._saved.loaded):
            raise SyncError(f"the outer loop has no state yet: call {call} inside its block")
        self._check_whole()
        if self._outer_steps.under_way:
            raise SyncError(
                f"a sync is under way (delay={self._schedule.delay}), and the state is not "
                f"complete until it is adopted. Call {call} in on_sync, or after a step at which "
                "`outer.syncing` is False."
            )
        self._model.check()

    def _watch_steps(self, check: Callable[[], None]) -> None:
        self._inner.steps.watch()
        try:
            check()
        except ConfigurationError:
            self._inner.steps.stop()
            raise

    def _stop(self) -> None:
        self._process.training = False
        self._inner.steps.stop()
        self._unseen.stop()
        self._place.leave()

    def _settle(self) -> None:
        """End in the last committed state.

        Changes that were made after it without a step would differ between replicas.
        """
        self._model.check()
        changed = self._outer_steps.settle()
        if not changed:
            return
        if self.inner_steps == self._inner_steps_before:
            raise UnseenStepsError(
                f"rank {self._exchange.rank}: parameters were changed inside the block "
                f"({notices.some(changed)}), but the inner optimizer did not take a single step. "
                "Nothing was synced, and the run's values were restored. Was a new optimizer "
                "made, or its step() replaced? Pass to DiLoCo(...) the optimizer that the "
                "training loop steps, and keep it. To change a model that is not trained, do so "
                "after the block.",
                changed[0],
            )
        notices.log.warning(notices.PUT_BACK, self._exchange.rank, notices.some(changed))

    def _check_whole(self) -> None:
        self._process.check()
        self._outer_steps.check_whole()

    def _check_before_sync(self) -> None:
        self._process.check()
        self._model.check()
        self._check_loads()
        self._own_weights.check()
        self._kept.before_sync()

    def _check_loads(self) -> None:
        """Refuse loaded values in fragments that have taken steps since their last sync.

        The others are restored at the end.
        """
        pairs = zip(self._fragments, self._count.since_sync, strict=True)
        self._loads.check([each.name for one, steps in pairs if not steps for each in one.tensors])

    def _note_sync(self) -> None:
        self._unseen.seen()
        self._loads.stepped()
        self._kept.after_sync()

    def _schema(self) -> Schema:
        checks = self._terms.init == "check" or bool(self._saved.loaded)
        return self._model.schema(self.committed, values=checks and not self._membership.resumes)
