"""The outer loop on each of several processes that are one replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch

from .._errors import ConfigurationError, SyncError
from .._exchange._replica import ReplicaExchange
from .._exchange._report import SyncReport
from .._inner._state import Stateful
from .._inner._steps import InnerSteps, StepCounter, optimizers_of
from .._loop._diloco import KINDS, DiLoCo
from .._loop._membership import SAVE_INNER_EVERY
from .._seconds import Seconds
from ._checks import refuse_together, same_tensors
from ._inside import Inside
from ._leader import LeaderLoop, Leading
from ._moves import Done, Failed, Gather, Mail, Move, Progress, Spread, failed
from ._twin import Twin, tensors_of
from ._values import Pair, gather, reshard, spread


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
        if stateful or save_inner_every not in {0, SAVE_INNER_EVERY}:
            raise ConfigurationError(
                "stateful= and save_inner_every= cannot be used yet where several processes are "
                "one replica: a replica that is started again has the weights of the run, and "
                "fresh inner optimizers. Leave them out"
            )
        if isinstance(sync_every, Seconds):
            # What processes tell the leader is taken at syncs alone, and they meet at every step.
            raise ConfigurationError(
                f"sync_every={sync_every!r} cannot be used yet where several processes are one "
                "replica: pass a number of inner steps"
            )
        self._exchange = exchange
        self._on_sync = on_sync
        self._wrapped = model
        self._sync_every = sync_every
        optimizers = optimizers_of(inner_optimizer)
        self._inside = Inside(exchange.patience)
        refuse_together(self._inside, model, optimizers, {"sync_every": sync_every, **options})
        reshard(model)
        self._pairs: list[Pair] = [(tensor, None) for tensor in tensors_of(model)]
        self._leading: Leading | None = None
        problem = None
        if self._inside.leads:
            try:
                self._lead(exchange, {"sync_every": sync_every, **options})
            except Exception as error:  # noqa: BLE001 - raised on every process
                problem = failed(error)
        if (problem := self._inside.share(problem)) is not None:
            raise problem.error()
        self._step = StepCounter(len(optimizers))
        self._steps = InnerSteps(optimizers, self._before, self._after)
        self._progress = Progress()
        self._pending = self._taken = self._tokens = 0
        self._rates: list[tuple[float, int | None]] = []
        self._is_open = self._entered = False
        self._steps.watch()

    def _lead(self, exchange: ReplicaExchange, options: dict[str, Any]) -> None:
        twin = Twin(self._wrapped)
        self._pairs = [(tensor, twin.of(tensor)) for tensor, _ in self._pairs]
        for name in ("fragments", "outer_groups"):
            if name in options:
                options[name] = twin.translated(options[name])
        self._leading = Leading(
            self._inside,
            self._pairs,
            lambda ask, tell: LeaderLoop(
                twin.model, exchange.open(), ask, save_inner_every=0, on_sync=tell, **options
            ),
        )

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
        return self._progress.inner_steps + self._pending

    @property
    def syncing(self) -> bool:
        """Say whether a sync is under way while this replica trains (``delay``)."""
        return self._progress.syncing

    @property
    def batches_to_skip(self) -> int:
        """The inner steps of this rank that the run had counted when the block was entered."""
        return self._progress.batches_to_skip

    def __enter__(self) -> Self:
        if self._entered:
            raise SyncError(
                "this outer loop has been entered already; make a new one for another run"
            )
        self._entered = True
        self._steps.watch()
        try:
            self._together(_enter, everything=True)
        except BaseException as error:
            self._end(error)
            raise
        self._is_open = self._steps.in_use = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            # The others may be in the middle of a step, so there is nothing to do together.
            if self._leading is not None:
                self._leading.loop.__exit__(kind, error, trace)
            self._end(error)
            return
        try:
            self._end_step()
            self._together(_leave, everything=True)
        except BaseException as late:
            self._end(late)
            raise
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        self._is_open = False
        self._steps.stop()
        self._inside.close()
        if error is None:
            self._exchange.leave()
        else:
            self._exchange.abort(error)

    def set_outer_lr(self, value: float, *, group: int | None = None) -> None:
        """Change the outer learning rate of the running run, from any process."""
        self._check_open("set_outer_lr()")
        self._rates.append((value, group))

    def count_tokens(self, n: int) -> None:
        """Say how many tokens this process learns from in the next inner step."""
        self._check_open("count_tokens()")
        self._tokens += n

    def flush(self) -> list[SyncReport]:
        """Sync every fragment that has inner steps since its last sync. All processes call it."""
        self._check_open("flush()")
        self._end_step()
        return self._together(LeaderLoop.flush, everything=True).result  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """Refuse: the run's store has the state.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            "state_dict() of an outer loop is not offered where several processes are one "
            "replica: the store holds the state of the run (connect(..., resume=True))"
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: ARG002
        """Refuse, as :meth:`state_dict` does."""
        self.state_dict()

    def _check_open(self, what: str) -> None:
        if not self._is_open:
            raise SyncError(f"{what} can only be called inside the block (`with DiLoCo(...)`)")

    def _before(self, optimizer: int) -> None:
        asked = (self._steps.has_used_gradient, self._steps.has_replaced_gradient)
        if self._is_open and self._step.before(optimizer, *asked):
            self._pending += 1

    def _after(self, optimizer: int) -> None:
        if not self._is_open:
            return
        if self._step.after(optimizer, self._steps.has_new_gradient):
            self._pending += 1
        if self._pending >= self._progress.next_in:
            self._together(lambda _: None)

    def _end_step(self) -> None:
        if self._step.end():
            self._pending += 1

    def _together(self, act: Callable[[LeaderLoop], Any], *, everything: bool = False) -> Done:
        """Meet the other processes; the leader counts the steps since, and then does one thing.

        Raises:
            Exception: What the leader's loop has raised, on every process.
        """
        reshard(self._wrapped)
        self._pairs = same_tensors(self._wrapped, self._pairs)
        self._taken += self._pending
        mail = Mail(self._taken, self._tokens, tuple(self._rates))
        if self._leading is not None:
            self._leading.pairs = self._pairs
            done = self._leading.together(self._counted(act), mail, everything=everything)
        else:
            done = self._follow(mail)
        self._pending = self._tokens = 0
        self._rates.clear()
        self._progress = done.progress
        for report in done.reports if self._on_sync else ():
            self._on_sync(report)  # type: ignore[misc]
        return done

    def _counted(self, act: Callable[[LeaderLoop], Any]) -> Callable[[], Any]:
        steps, loop = self._pending, self._leading.loop  # type: ignore[union-attr]

        def both() -> Any:
            for _ in range(steps):
                loop.counting.step()
            return act(loop)

        return both

    def _follow(self, mail: Mail) -> Done:
        while True:
            move: Move = self._inside.share()
            match move:
                case Gather():
                    if move.mail:
                        self._inside.collect(mail)
                    gather(self._pairs[number] for number in move.tensors)
                case Spread():
                    spread(self._inside, [self._pairs[number] for number in move.tensors])
                case Done():
                    return move
                case Failed():
                    raise move.error()


def _enter(loop: LeaderLoop) -> None:
    loop.__enter__()


def _leave(loop: LeaderLoop) -> None:
    loop.__exit__(None, None, None)


KINDS[ReplicaExchange] = ReplicaLoop
