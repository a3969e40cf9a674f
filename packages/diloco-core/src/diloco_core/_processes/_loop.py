"""The outer loop on each of several processes that are one replica, and where these meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch

from .._arithmetic._layout import Rule
from .._checks import whole
from .._errors import ConfigurationError, ProcessFailedError, SyncError
from .._exchange._replica import ReplicaExchange
from .._exchange._report import SyncReport
from .._exchange._telemetry import Logged
from .._inner._kept_weights import KeptWeights
from .._inner._own_weights import OwnWeights
from .._inner._state import Stateful
from .._inner._steps import InnerSteps, StepCounter, optimizers_of
from .._inner._unseen_changes import UnseenChanges
from .._loop._arguments import check_not_entered, check_parties, stateful_of, tokens_counted
from .._loop._diloco import KINDS, DiLoCo
from .._loop._global_model import GlobalModel
from .._loop._inner_loop import TrainingProcess
from .._loop._membership import SAVE_INNER_EVERY, check_stateful
from .._loop._own_state import know_data
from .._model._loads import Loads
from .._model._own_buffers import OwnBuffers
from .._model._partition import NamedTensor, check_shapes
from .._model._values import plain_name
from .._model._watch import ModelWatch
from .._outer._optimizer import checked_lr
from .._run._exchange import StoreExchange
from .._seconds import Seconds
from .._terms._schedule import MANY_STEPS
from .._terms._terms import Weighting
from ._checks import refuse_open_gradients, refuse_together
from ._ending import Ending
from ._inner_states import InnerStates, PartialState, layout_of
from ._inside import Inside
from ._leader import LeaderLoop, Leading, follow
from ._moves import Done, Mail, Progress
from ._shared import shared_values
from ._twin import Twin, tensors_of
from ._values import Held, held_tensors, reshard, samples

_SAME_SIGNAL = 5.0
"""Seconds. Whoever ends all processes of a machine tells torchrun too, which tells them again."""


class ReplicaLoop(DiLoCo):
    """What ``DiLoCo(...)`` makes on each process of a replica of several; see :class:`.DiLoCo`.

    The leader runs the outer loop over a twin of the model, on the CPU. When a fragment is sent,
    all processes gather its values there, and what the loop has adopted is given to all of them.
    Between syncs each process counts its own steps, and nothing is exchanged.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        exchange: ReplicaExchange,
        *,
        sync_every: int | Seconds,
        stateful: Mapping[str, Stateful] | None = None,
        save_inner_every: int = SAVE_INNER_EVERY,
        on_sync: Callable[[SyncReport], None] | None = None,
        **options: Any,
    ) -> None:
        self._exchange = exchange
        self._on_sync = on_sync
        self._wrapped = model
        self._sync_every = sync_every
        self._process = TrainingProcess(_SAME_SIGNAL)
        self._inside = Inside(exchange.patience, exchange.group)
        options |= {"sync_every": sync_every, "save_inner_every": save_inner_every}
        told = {**options, **exchange.settings, "rank": exchange.rank}
        self._weight = options.get("weight")
        self._many = MANY_STEPS if isinstance(sync_every, Seconds) else sync_every
        syncs_buffers = options.get("buffers") != "none"

        def prepare() -> None:
            check_parties(model, exchange, on_sync)
            check_shapes(model)
            reshard(model)
            optimizers = optimizers_of(inner_optimizer)
            check_stateful(named := stateful_of(stateful), save_inner_every)
            told["stateful"] = list(named)
            names = {id(each): plain_name(model, name) for name, each in model.named_parameters()}
            self._trained = [
                NamedTensor(names[id(p)], p, Rule.OUTER)
                for p in model.parameters()
                if p.requires_grad
            ]
            self._loads = Loads(model, self._trained)
            self._kept = KeptWeights(optimizers, names)
            self._own_weights = OwnWeights(optimizers, names)
            self._watch = ModelWatch(model, optimizers, buffers_are_synced=syncs_buffers)
            buffers = {} if syncs_buffers else {"buffers": OwnBuffers(model)}
            own = PartialState(optimizers, named, names, buffers)
            self._inner_states = InnerStates(self._inside, own, self._process)
            self._inner_states.knows_data = know_data(named.values())
            self._steps = InnerSteps(optimizers, self._before, self._after, self._many)

        refuse_together(self._inside, model, told, prepare)
        self._layout = layout_of(self._inside, model)
        tensors = tensors_of(model) if syncs_buffers else list(model.parameters())
        self._held = held_tensors(self._inside, tensors, shared_values(self._inside, tensors))
        self._leading: Leading | None = None
        self._logged = Logged()
        self._inside.together(lambda: self._lead(exchange, options))
        self._ending = Ending(self._inside, self._process, lambda: self._taken)
        self._inside.failure = self._ending.broken_by
        self._global_model = GlobalModel(self._synced, self._put_global, self._now, self._loads)
        self._unseen = UnseenChanges(self._trained, self._many)
        self._step = StepCounter(len(self._steps.optimizers))
        self._progress = Progress()
        self._taken = self._met = self._tokens = 0
        self._rates: list[tuple[float, int | None]] = []
        self._entered = False
        self._steps.watch()

    def _lead(self, exchange: ReplicaExchange, options: dict[str, Any]) -> None:
        if not self._inside.leads:
            return
        twin = Twin(self._wrapped, {id(each.tensor): each.whole for each in self._held})
        for name in ("fragments", "outer_groups"):
            if name in options:
                options[name] = twin.translated(options[name])
        opened = exchange.open()
        assert isinstance(opened, StoreExchange)
        opened.layout = self._layout
        if options["save_inner_every"]:
            options["stateful"] = {"processes": self._inner_states}
        wholes = [each.whole for each in self._held]
        self._leading = leading = Leading(self._inside, wholes, self._now, self._process)
        options["on_sync"] = leading.reports.append
        leading.loop = LeaderLoop(twin.model, opened, leading.ask, self._loads, **options)
        self._inner_states.before_save = partial(leading.ask, wholes)
        if opened.telemetry is not None:
            self._logged = opened.telemetry.logged
            opened.telemetry.steps = lambda: self.inner_steps

    @property
    def sync_every(self) -> int | Seconds:
        """Inner steps, or seconds, between two syncs of the same fragment."""
        return self._sync_every

    @property
    def committed(self) -> int:
        """Outer steps that the model has taken so far."""
        return self._progress.committed

    @property
    def inner_steps(self) -> int:
        """Inner steps taken so far."""
        return self._progress.inner_steps + self._taken - self._met

    @property
    def syncing(self) -> bool:
        """Say whether a sync is under way while this replica trains (``delay``)."""
        return self._progress.syncing

    @property
    def batches_to_skip(self) -> int:
        """The inner steps of this rank that the run had counted when the block was entered."""
        return (self._leading.loop if self._leading else self._progress).batches_to_skip

    def __enter__(self) -> Self:
        check_not_entered(self._entered)
        self._entered = True
        self._steps.watch()
        self._process.training = True
        self._ending.start()
        try:
            self._together(_enter)
        except BaseException as error:
            self._end(error)
            raise
        self._loads.watch()
        self._unseen.watch()
        self._steps.in_use = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._process.training = True  # what the others are told now is not interrupted
            cause = self._ending.cause(error)
            if self._leading is not None:
                self._leading.loop.__exit__(type(cause), cause, trace)
            self._end(cause)
            if cause is not error:
                raise cause from error
            return
        try:
            self._process.check()
            self._global_model.refuse("the end of the block of DiLoCo")
            self._unseen.check()
            self._taken += self._step.end()
            self._together(lambda loop: loop.__exit__(None, None, None), "the end of the block")
        except BaseException as late:
            self._end(late)
            raise
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        if self._process.is_fork():
            return  # the parent continues the run
        self._process.training = True  # as above
        self._loads.stop()
        self._unseen.stop()
        self._steps.stop()
        self._ending.stop()
        if error is None:
            self._exchange.leave()
        else:
            self._exchange.abort(error)
            with suppress(RuntimeError, ProcessFailedError):  # the others may be gone already
                if error is self._inside.common:
                    # All have it. The leader tells the other replicas first: once a process has
                    # ended, whatever has started it may end the others.
                    self._inside.share()
                else:
                    self._ending.fail(error)
        self._inside.close()

    def set_outer_lr(self, value: float, *, group: int | None = None) -> None:
        """Change the outer learning rate of the running run, from any process."""
        self._check_open("set_outer_lr()")
        rate = checked_lr("the outer learning rate", value)
        self._rates.append((rate, None if group is None else whole("group", group, 0)))

    def count_tokens(self, n: int) -> None:
        """Say how many tokens this process learns from in the next inner step."""
        self._check_open("count_tokens()")
        weighting = Weighting(self._weight or Weighting.EQUAL)
        self._tokens += tokens_counted(weighting, n, self._tokens)

    def log(self, **metrics: float | str) -> None:
        """Say how the training goes; what process 0 says is written."""
        self._check_open("log()")
        self._logged.take(metrics)

    def flush(self) -> list[SyncReport]:
        """Sync every fragment that has inner steps since its last sync. All processes call it."""
        self._check_open("flush()")
        self._global_model.refuse("flush()")
        self._taken += self._step.end()
        return self._together(LeaderLoop.flush, "flush()").result  # type: ignore[no-any-return]

    @contextmanager
    def global_model(self) -> Iterator[None]:
        """Put the last committed values into the model of each process. All enter it."""
        self._check_open("global_model()")
        with self._global_model.in_place():
            yield

    def global_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the last committed values on process 0; nothing on the others. All call it."""
        self._check_open("global_state_dict()")
        values: dict[str, torch.Tensor] = {}
        copy = lambda loop: values.update(loop.global_state_dict())  # noqa: E731
        self._together(copy, "global_state_dict()")
        return values

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: ARG002
        """Refuse, as ``state_dict()`` does."""
        self._check_settled("load_state_dict()")

    def _check_settled(self, call: str) -> None:
        raise ConfigurationError(
            f"{call} is not offered where several processes are one replica: the store has the run "
            "(connect(..., resume=True)), and global_state_dict() has its values on process 0"
        )

    def _check_open(self, what: str) -> None:
        self._process.check()
        if not self._steps.in_use:
            raise SyncError(f"{what} can only be called inside the block (`with DiLoCo(...)`)")

    def _before(self, optimizer: int) -> None:
        self._process.check()
        self._global_model.refuse("a step of the inner optimizer")
        self._unseen.steps()
        self._loads.check()
        asked = (self._steps.has_used_gradient, self._steps.has_replaced_gradient)
        self._taken += self._step.before(optimizer, *asked)

    def _after(self, optimizer: int) -> None:
        self._unseen.seen()
        self._kept.check(optimizer)
        self._taken += self._step.after(optimizer, self._steps.has_new_gradient)
        ends = self._ending.asked and self._taken >= self._ending.last_step()
        wait = self._progress.wait if self._step.stepped else 0
        if ends or self._taken - self._met >= self._progress.next_in + wait:
            # The sync holds what was learned in the step under way, so it has to count it.
            self._taken += self._step.count_early()
            self._together(None, ends=ends)
        self._loads.stepped()

    def _together(
        self, act: Callable[[LeaderLoop], Any] | None, call: str = "", *, ends: bool = False
    ) -> Done:
        """Meet the other processes; the leader counts the steps since, and may then do one thing.

        The call is what the program has called for it.

        Raises:
            Exception: What the leader's loop has raised, on every process.
        """
        self._call, steps = call, self._taken - self._met
        if self._leading is None:
            done = follow(self._inside, self._now, self._mail, self._inner_states, steps)
        else:
            ends = ends or (self._steps.in_use and self._process.told_to_end)
            done = self._leading.together(act, self._mail, steps, ends=ends)
        if done.mail:
            self._tokens = 0
            self._rates.clear()
        self._met = self._taken
        if not self._global_model.is_in_place:  # then, nothing is adopted
            if done.mail:
                self._kept.after_sync()
            self._loads.stepped()
        for report in done.reports if self._on_sync else ():
            # Others may have come after it.
            self._progress = replace(done.progress, committed=report.sync)
            self._on_sync(report)  # type: ignore[misc]
        self._progress = done.progress
        return done

    def _synced(self) -> list[torch.Tensor]:
        reshard(self._wrapped)
        return [each.tensor for each in self._held if each.is_synced]

    def _put_global(self) -> None:
        gradients = [(each, each.grad) for each in self._synced()]
        self._together(LeaderLoop.put_global, "global_model()")
        for tensor, gradient in gradients:
            tensor.grad = gradient

    def _now(self) -> list[Held]:
        """Return what is held; buffers may be new tensors, and FSDP may have made parts whole."""
        reshard(self._wrapped)
        self._watch.check()
        pairs = zip(self._held, tensors_of(self._wrapped), strict=False)
        self._held = [held._replace(tensor=tensor) for held, tensor in pairs]
        return self._held

    def _mail(self) -> Mail:
        refuse_open_gradients(self._wrapped)
        self._own_weights.check()
        self._kept.before_sync()
        return Mail(self._taken, self._tokens, tuple(self._rates), samples(self._held), self._call)


def _enter(loop: LeaderLoop) -> None:
    loop.__enter__()


KINDS[ReplicaExchange] = ReplicaLoop
