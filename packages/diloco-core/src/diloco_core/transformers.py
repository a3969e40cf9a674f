"""A callback for the ``Trainer`` of Hugging Face's transformers: ``diloco-core[transformers]``.

It serves the trainers that are made from it as well, such as those of TRL.
"""

from __future__ import annotations

import inspect
import logging
import math
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import IterableDataset

from ._connect import connect
from ._errors import ConfigurationError
from ._exchange._base import Exchange
from ._exchange._replica import ReplicaExchange
from ._exchange._report import SyncReport
from ._generators import random_state, set_random_state
from ._loop._arguments import stateful_of
from ._loop._diloco import DiLoCo
from ._run._exchange import StoreExchange
from ._seconds import Seconds

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        f"diloco_core.transformers needs transformers ({error}): "
        "pip install 'diloco-core[transformers]'"
    ) from error

__all__ = ["DiLoCoCallback"]

_log = logging.getLogger(__name__)
_STORE = "the run's store"  # where a trainer expects the folder of a checkpoint
_READ_AGAIN = "the data is a stream without a position: %d batches are read again and passed over"
_OURS = "diloco_"  # how the names of our own metrics begin
_LOGGED = ("sync", "members", "bytes_sent", "wait_seconds", "exchange_seconds", "exposed_seconds")
# What a Trainer knows and its optimizer does not.
_KEPT = ("best_metric", "best_model_checkpoint", "best_global_step", "num_input_tokens_seen")


class DiLoCoCallback(TrainerCallback):  # type: ignore[misc]
    """Trains the model of a ``Trainer`` as one replica of a run.

    ``Trainer(..., callbacks=[DiLoCoCallback(connect(), sync_every=500)])``. The block of
    :class:`DiLoCo` is entered when the training begins, after the trainer has loaded a checkpoint
    of its own, if it does; and left after the last step, or by an error.

    A replica that is started again goes on from the run's store: the model, the optimizer, the
    schedule, the random generators, and the number of steps taken, which the trainer passes over in
    its data. What the trainer's own checkpoint holds counts only where the store holds nothing.

    What the trainer logs goes into the run's telemetry (:meth:`DiLoCo.log`), and the trainer logs
    every sync, under names that begin with ``diloco_``.

    A callback serves one call of ``train()``. Not thread-safe.

    Args:
        exchange: The connection to the other replicas; if left out, what :func:`connect` returns
            without arguments when the training begins.
        sync_every: Optimizer steps between two syncs; see :class:`DiLoCo`.
        **options: Further arguments of :class:`DiLoCo`.

    Attributes:
        outer: The outer loop; None before the training.

    Raises:
        ConfigurationError: An option is not known. Or, when the training begins, something does not
            go together with this callback. Nothing was sent.
    """

    def __init__(
        self, exchange: Exchange | None = None, *, sync_every: int | Seconds, **options: Any
    ) -> None:
        known = inspect.signature(DiLoCo).parameters.keys() - {"model", "inner_optimizer"}
        if unknown := options.keys() - known:
            raise ConfigurationError(
                f"DiLoCoCallback has no option {', '.join(sorted(unknown))}: it takes those of "
                f"DiLoCo, which are {', '.join(sorted(known - {'exchange'}))}"
            )
        self.outer: Any = None
        self._exchange, self._sync_every, self._options = exchange, sync_every, options
        self._on_sync = options.pop("on_sync", None)
        self._reports: list[SyncReport] = []
        self._replaced: list[tuple[Any, str, Any]] = []
        self._is_open = self._has_begun = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Enter the block, and find the step at which this replica begins."""
        trainer = self._trainer = _calling_trainer()
        if self.outer is not None:
            raise ConfigurationError(
                "this DiLoCoCallback was used for a training already: make a new one for each "
                "call of train()"
            )
        _check(trainer, self._sync_every, self._options.get("fragments", 1))
        exchange = connect() if self._exchange is None else self._exchange
        self._place = _Place(trainer)
        self.outer = DiLoCo(
            trainer.model_wrapped,
            trainer.optimizer,
            exchange,
            sync_every=self._sync_every,
            on_sync=self._synced,
            **_with_states(self._options, exchange, trainer, self._place),
        )
        if _is_of(signal.getsignal(signal.SIGTERM), "transformers"):
            # It would only save a checkpoint: the outer loop saves, and tells the other replicas.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.outer.__enter__()
        self._is_open = True
        self._guarded(self._take_over)(trainer, int(state.global_step))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Refuse a trainer that has begun without this callback.

        Raises:
            ConfigurationError: It has.
        """
        if self.outer is None:
            raise ConfigurationError(
                "this DiLoCoCallback was added after the training began: pass it to the Trainer "
                "in callbacks"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Note the step; after the last one, sync what is left and leave the block."""
        self._place.note(self.outer.inner_steps)
        if control.should_training_stop:
            self._leave()  # not in on_train_end: there, the best checkpoint has been loaded
        self._log_syncs(control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
        """Take what the trainer logs into the run's telemetry."""
        logs = {name: value for name, value in (logs or {}).items() if not name.startswith(_OURS)}
        if self._is_open and logs:
            try:
                self.outer.log(**logs)
            except ConfigurationError as error:
                _log.warning("the run's telemetry leaves out what the trainer logs: %s", error)

    def _take_over(self, trainer: Any, resumed: int) -> None:
        """Have the trainer begin where the run stands, and its errors leave the block."""
        self._random, self._resumed = random_state(), resumed
        self._begin = self._place.find(self.outer.inner_steps)
        if resumed and self._begin != resumed:
            _log.warning(
                "the checkpoint that was given to the trainer is of step %d, and the run's store "
                "holds step %d of replica %d: the store counts, and it begins there",
                resumed,
                self._begin,
                self.outer.exchange.rank,
            )
        # The sum of the losses since then is divided by the steps since then.
        trainer._globalstep_last_logged = self._begin  # noqa: SLF001 - nothing else leads there
        trainer._initial_global_step = self._begin  # noqa: SLF001
        self._run_whole = trainer._run_epoch  # noqa: SLF001
        events = trainer.callback_handler
        self._replace(trainer, "_run_epoch", self._guarded(self._run_epoch))
        # Where errors come from before the epochs, and between them.
        later = events.callbacks[events.callbacks.index(self) + 1 :]
        places = [(trainer, "_evaluate"), (events, "on_epoch_begin")]
        for holder, name in [*places, *((callback, "on_train_begin") for callback in later)]:
            self._replace(holder, name, self._guarded(getattr(holder, name)))

    def _replace(self, holder: Any, name: str, act: Callable[..., Any]) -> None:
        self._replaced.append((holder, name, vars(holder).get(name)))
        setattr(holder, name, act)

    def _synced(self, report: SyncReport) -> None:
        self._reports.append(report)
        if self._on_sync is not None:
            self._on_sync(report)

    def _log_syncs(self, control: Any) -> None:
        should_log = control.should_log
        for report in self._reports:
            self._trainer.log({f"{_OURS}{name}": getattr(report, name) for name in _LOGGED})
        self._reports.clear()
        control.should_log = should_log  # the trainer logs its loss, too

    def _leave(self, error: BaseException | None = None) -> None:
        if self._is_open:
            self._is_open = False
            for holder, name, before in reversed(self._replaced):
                if before is None:
                    delattr(holder, name)  # the class has the trainer's own
                else:
                    setattr(holder, name, before)
            self.outer.__exit__(error and type(error), error, error and error.__traceback__)

    def _guarded(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that leaves the block where another one raises an error."""

        def guarded(*given: Any, **named: Any) -> Any:
            try:
                return act(*given, **named)
            except BaseException as error:
                self._leave(error)
                raise

        return guarded

    def _run_epoch(self, **call: Any) -> None:
        """Run an epoch of the trainer, or what is left of it for this replica."""
        trainer, state = self._trainer, self._trainer.state
        for part in self._epochs(call):
            if part["resume_from_checkpoint"] != _STORE:
                self._place.random = random_state()
            self._run_whole(**part)
        if trainer.control.should_training_stop or call["epoch"] + 1 >= state.num_train_epochs:
            self._leave()
            self._log_syncs(trainer.control)

    def _epochs(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Return the arguments for the epochs, or parts of them, that the trainer runs now."""
        trainer, epoch, loader = self._trainer, call["epoch"], call["train_dataloader"]
        if self._begin == self._resumed:
            yield call
            return
        whole = call | {"resume_from_checkpoint": None}
        first, steps = divmod(self._begin, call["num_update_steps_per_epoch"])
        under_way = first if steps else first - 1  # the epoch of the step that was taken last
        if self._has_begun:
            yield whole
        elif epoch < under_way:
            _pass_over(loader, epoch)
        else:
            self._has_begun = True
            if not steps:
                _pass_over(loader, under_way)
            set_random_state(self._random)
            if self._begin:
                self._end_step(call, under_way, ends_epoch=not steps)
            if steps and not trainer.control.should_training_stop:
                # As where it resumes from a checkpoint, but for the random generators.
                after = random_state()
                self._replace(trainer, "_load_rng_state", lambda _: set_random_state(after))
                batches = steps * trainer.args.gradient_accumulation_steps
                if not trainer.args.ignore_data_skip:
                    set_random_state(self._place.random)  # some samplers draw their order from it
                    if _is_stream(loader):
                        _log.warning(_READ_AGAIN, batches)
                place = {"epochs_trained": first, "steps_trained_in_current_epoch": batches}
                yield call | place | {"epoch": first, "resume_from_checkpoint": _STORE}
            # A checkpoint from which the trainer resumes may be of a later epoch.
            for number in range(under_way + 1, epoch + 1):
                if not trainer.control.should_training_stop:
                    yield whole | {"epoch": number}

    def _end_step(self, call: dict[str, Any], epoch: int, *, ends_epoch: bool) -> None:
        """Do what a trainer does after the optimizer's step, in which the store's state was saved.

        It may evaluate, which draws random numbers.
        """
        trainer, events = self._trainer, self._trainer.callback_handler
        trainer.state.epoch = self._begin / call["num_update_steps_per_epoch"]
        for event in (events.on_step_end, events.on_epoch_end)[: 1 + ends_epoch]:
            trainer.control = event(trainer.args, trainer.state, trainer.control)
            trainer._maybe_log_save_evaluate(  # noqa: SLF001
                trainer._tr_loss,  # noqa: SLF001
                None,
                call["model"],
                call["trial"],
                epoch,
                call["ignore_keys_for_eval"],
                call["start_time"],
            )


class _Place:
    """Where a trainer is, beside what its outer loop counts; see :class:`.Stateful`."""

    knows_data = False

    def __init__(self, trainer: Any) -> None:
        self._state, self._schedule = trainer.state, trainer.lr_scheduler
        self._has_schedule = isinstance(self._schedule, LRScheduler) and not isinstance(
            self._schedule, ReduceLROnPlateau
        )
        # By how many steps the trainer is ahead of the outer loop, and of its schedule: a gradient
        # scaler may leave out a step, and a new run may begin at a checkpoint of the trainer's.
        self._ahead = self._ahead_of_schedule = 0
        self.random = random_state()  # as the epoch under way began
        self._restored = False

    def note(self, inner_steps: int) -> None:
        """Note that a step of the trainer has ended."""
        self._ahead = self._state.global_step - inner_steps
        if self._has_schedule:
            self._ahead_of_schedule = self._state.global_step - self._schedule.last_epoch

    def find(self, inner_steps: int) -> int:
        """Take the trainer to the step that the run's store tells, and return that."""
        if self._restored or inner_steps:
            self._state.global_step = inner_steps + self._ahead
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # no optimizer has stepped in this process
                while (
                    self._has_schedule
                    and self._schedule.last_epoch + self._ahead_of_schedule
                    < self._state.global_step
                ):
                    self._schedule.step()
        self.note(inner_steps)
        return int(self._state.global_step)

    def try_out(self) -> None:
        """Do nothing: these are numbers, a text, and what every replica saves."""

    def state_dict(self) -> dict[str, Any]:
        """Return what find() needs, and what the trainer has found out so far."""
        kept = {name: getattr(self._state, name) for name in _KEPT}
        return {"ahead": [self._ahead, self._ahead_of_schedule], "random": self.random, **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with saved numbers."""
        self._restored = True
        self._ahead, self._ahead_of_schedule = state["ahead"]
        self.random = state["random"]
        for name in _KEPT:
            setattr(self._state, name, state[name])


def _check(trainer: Any, sync_every: int | Seconds, fragments: object) -> None:
    """Refuse a trainer that does not go together with an outer loop."""
    callbacks = trainer.callback_handler.callbacks
    if sum(isinstance(callback, DiLoCoCallback) for callback in callbacks) > 1:
        raise ConfigurationError("the Trainer has two DiLoCoCallbacks: give it one")
    if trainer.is_deepspeed_enabled:
        raise ConfigurationError("DiLoCoCallback does not work with DeepSpeed: use DDP or FSDP2")
    args = trainer.args
    if args.auto_find_batch_size:
        raise ConfigurationError(
            "DiLoCoCallback does not work with auto_find_batch_size, which would begin again in "
            "the middle of a run: set per_device_train_batch_size to what fits"
        )
    if isinstance(sync_every, Seconds):
        return
    if per_generation := getattr(args, "steps_per_generation", None):
        # GRPO: the weights must not change in between, or samples are of another policy.
        batches = per_generation * getattr(args, "num_iterations", 1)
        unit = batches // math.gcd(batches, args.gradient_accumulation_steps)
        unit *= fragments if isinstance(fragments, int) else 1
        if sync_every % unit:
            raise ConfigurationError(
                f"sync_every={sync_every} would change the model between the steps that learn from "
                f"the same generations, which are {unit}: choose a multiple of that, such as "
                f"{max(unit, round(sync_every / unit) * unit)}"
            )
    if 0 < trainer.state.max_steps < sync_every:
        _log.warning(
            "the training has %d steps, and sync_every is %d: the replicas will only sync once, at "
            "the end",
            trainer.state.max_steps,
            sync_every,
        )


def _with_states(
    options: Mapping[str, Any], exchange: object, trainer: Any, place: _Place
) -> dict[str, Any]:
    """Return options of an outer loop that saves what the trainer needs to come back."""
    given = stateful_of(options.get("stateful"))
    has_store = isinstance(exchange, (StoreExchange, ReplicaExchange))
    if not has_store or options.get("save_inner_every") == 0:
        return dict(options)
    scaler = getattr(trainer.accelerator, "scaler", None)
    states = {"trainer": place, "lr_scheduler": trainer.lr_scheduler, "scaler": scaler}
    if taken := given.keys() & states.keys():
        raise ConfigurationError(
            f"stateful of DiLoCoCallback has {', '.join(sorted(taken))}, which the callback saves "
            "by itself: choose another name"
        )
    needed = {name: state for name, state in states.items() if state is not None}
    return {**options, "stateful": {**needed, **given}}


def _pass_over(loader: Any, epoch: int) -> None:
    """Have samplers with random generators of their own draw what they drew in an earlier epoch."""
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
    for _ in () if _is_stream(loader) else getattr(loader, "batch_sampler", None) or ():
        pass


def _is_stream(loader: Any) -> bool:
    """Say whether the data of a loader are a stream; its sampler would never end."""
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def _calling_trainer() -> Any:
    """Return the trainer that is calling its callbacks: it does not tell them."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - there is no other way
    while frame is not None:
        if isinstance(trainer := frame.f_locals.get("self"), Trainer):
            return trainer
        frame = frame.f_back
    raise ConfigurationError("DiLoCoCallback must be called by a Trainer of transformers")


def _is_of(handler: object, package: str) -> bool:
    """Say whether a package has made a signal's handler."""
    return str(getattr(handler, "__module__", "")).partition(".")[0] == package
