"""Noticing the steps of the inner optimizers through hooks, and counting inner steps.

Several optimizers take an inner step together.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .._errors import ConfigurationError, SyncError

_lock = threading.Lock()
# Weak on both sides, since an InnerSteps refers to its optimizers, and through the outer loop to a
# model. The hooks keep it alive.
_watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[InnerSteps]] = (
    weakref.WeakKeyDictionary()
)


def optimizers_of(given: object) -> list[torch.optim.Optimizer]:
    """The inner optimizers as a list, whether one or several are given.

    Raises:
        ConfigurationError: None is given, something else is given, or one optimizer is given twice.
    """
    optimizers: list[torch.optim.Optimizer] = []
    for optimizer in given if isinstance(given, (list, tuple)) else [given]:
        if type(optimizer).__module__.startswith("accelerate."):
            optimizer = getattr(optimizer, "optimizer", optimizer)  # which the other one only steps
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(
                "inner_optimizer must be a torch.optim.Optimizer or a list of them, not "
                f"{optimizer!r}"
            )
        if not (
            hasattr(optimizer, "_optimizer_step_pre_hooks")
            and getattr(type(optimizer).step, "hooked", False)
        ):
            raise ConfigurationError(
                f"the steps of {type(optimizer).__name__} cannot be counted, since it was made "
                "without the constructor of torch.optim.Optimizer: pass the optimizer that it "
                "wraps. If it writes weights of its own into the model, as Lookahead does, leave "
                "it out and step the other one: every sync would be undone, without an error"
            )
        if any(optimizer is other for other in optimizers):
            raise ConfigurationError(
                "inner_optimizer holds the same optimizer twice: pass each optimizer once"
            )
        optimizers.append(optimizer)
    if not optimizers:
        raise ConfigurationError(
            "inner_optimizer is empty: pass the optimizer that the training loop steps"
        )
    return optimizers


@dataclass(eq=False)
class InnerSteps:
    """Calls one function before each step of some optimizers, and another one after it.

    They are called for steps inside the block of the outer loop; many steps before that are
    refused. Not thread-safe.

    Only one outer loop at a time watches an optimizer. A loop that was never entered gives way to
    the next one that is made.

    Args:
        optimizers: The optimizers to watch.
        before: Called with the number of an optimizer before each of its steps.
        after: Called with the number of an optimizer after each of its steps.
        many: How many steps of an optimizer are too many before the block.

    Attributes:
        in_use: Whether the outer loop has been entered; no other may take over its optimizers then.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    before: Callable[[int], None]
    after: Callable[[int], None]
    many: int

    def __post_init__(self) -> None:
        self.in_use = False
        self._handles: list[RemovableHandle] = []
        self._under_way: dict[int, FrameType] = {}
        self._outside = [0] * len(self.optimizers)  # steps before the block
        self._inside = [0] * len(self.optimizers)  # calls of step() inside of a step under way
        self._used: dict[int, tuple[torch.Tensor, weakref.ref[torch.Tensor], int]] = {}
        self._new: dict[int, weakref.ref[torch.Tensor]] = {}

    def watch(self) -> None:
        """Begin to watch; repeatable.

        Raises:
            ConfigurationError: Another outer loop that was entered uses one of the optimizers.
        """
        with _lock:
            watching = [_watched[o]() for o in self.optimizers if o in _watched]
            others = {id(o): o for o in watching if o is not None and o is not self}
            if any(other.in_use for other in others.values()):
                raise ConfigurationError(
                    "another outer loop is using this inner optimizer: leave the block of that "
                    "loop before you make the next one"
                )
            for other in others.values():
                other.stop()
            for number, optimizer in enumerate(self.optimizers if not self._handles else ()):
                _watched[optimizer] = weakref.ref(self)
                self._handles += [
                    optimizer.register_step_pre_hook(untraced(partial(self._begins, number))),
                    optimizer.register_step_post_hook(untraced(partial(self._ends, number))),
                ]

    def stop(self) -> None:
        """Stop watching; repeatable."""
        self.in_use = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._under_way.clear()
        self._used.clear()
        self._new.clear()

    # If a class overrides step() and calls that of its parent, torch calls the hooks for both. Only
    # the outer call is a step. It is recognized by the frame that calls the hooks: torch's wrapper,
    # or what torch.compile has made of its parts, which call each other.

    def _begins(self, number: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # The question itself would begin to use the device, in a process that does not.
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # so in torch
        if in_use and torch.cuda.is_current_stream_capturing():
            raise ConfigurationError(
                f"{self.describe(number)} steps while a CUDA graph is captured. A replay of the "
                "graph calls no hooks, so its steps would not be counted and nothing would be "
                "synced: capture the forward and backward passes alone, and call step() after each "
                "replay"
            )
        # A fused optimizer is called by a gradient scaler for a step that it skips, too. Reading
        # what the scaler has found waits for the device, as the scaler itself does before the step
        # of an optimizer that is not fused.
        if bool(getattr(optimizer, "found_inf", False)):
            return
        caller = _caller()
        # A call that an exception has ended is not on the stack any more, and does not count.
        if _is_on_stack(self._under_way.get(number), caller):
            self._inside[number] += 1
            return
        self._under_way[number], self._inside[number] = caller, 0
        if self.in_use:
            self.before(number)

    def _ends(self, number: int, *_: Any) -> None:
        frame, caller = self._under_way.get(number), _caller()
        if frame is not caller and (self._inside[number] or not _is_on_stack(frame, caller)):
            self._inside[number] = max(0, self._inside[number] - 1)
            return
        del self._under_way[number]
        if len(self.optimizers) > 1:
            self._remember_gradient(number)
        if self.in_use:
            self.after(number)
            return
        self._outside[number] += 1
        if self._outside[number] >= self.many:
            raise SyncError(
                f"{self._outside[number]} inner steps were taken since this outer loop was made, "
                "but its block was never entered, so nothing is synced. Train inside the block "
                "(with DiLoCo(...) as outer: ...)."
            )

    def describe(self, number: int) -> str:
        """Return how messages name an optimizer."""
        return f"inner optimizer {number} ({type(self.optimizers[number]).__name__})"

    def has_used_gradient(self, number: int) -> bool:
        """Say whether an optimizer still has the gradients that it has used in its last step."""
        if number not in self._used:
            return False
        parameter, used_gradient, version = self._used[number]
        gradient = parameter.grad
        return (
            # torch has no public way
            gradient is not None and gradient is used_gradient() and gradient._version == version  # noqa: SLF001
        )

    def has_new_gradient(self, number: int) -> bool:
        """Say whether an optimizer has gradients that it has not used yet, and remember which.

        It is about to step then.
        """
        gradient = self._used[number][0].grad if number in self._used else None
        if gradient is None or self.has_used_gradient(number):
            return False
        self._new[number] = weakref.ref(gradient)
        # Zeros are not new gradients: zero_grad(set_to_none=False) has written them.
        return gradient.layout is not torch.strided or bool(gradient.any())

    def has_replaced_gradient(self, number: int) -> bool:
        """Say whether an optimizer has other gradients than when it had new ones.

        If so, zero_grad() has thrown those away.
        """
        used, new = self._used.get(number), self._new.get(number)
        return used is not None and new is not None and used[0].grad is not new()

    def _remember_gradient(self, number: int) -> None:
        self._used.pop(number, None)
        for group in self.optimizers[number].param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._used[number] = (
                        parameter,
                        weakref.ref(parameter.grad),
                        parameter.grad._version,  # noqa: SLF001 - it is public only in C++
                    )
                    return


def _caller() -> FrameType:
    """The frame that has called a hook."""
    frame = sys._getframe(2)  # noqa: SLF001
    while frame.f_code.co_name in _NAMES and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_on_stack(frame: FrameType | None, top: FrameType | None) -> bool:
    """Say whether a frame is ``top``, or one of its callers."""
    while top is not None and frame is not None:
        if top is frame:
            return True
        top = top.f_back
    return False


class StepCounter:
    """The grouping of the steps of several optimizers into inner steps.

    In an inner step, each of them steps at most once. It is complete when all optimizers have
    stepped, in any order. It also ends when one of them is about to step again, since then a
    gradient scaler has skipped the others. This shows in one of two ways: the optimizer begins its
    next step, or it has new gradients already when the last of the others steps. With one
    optimizer, each of its steps is an inner step.

    Where every optimizer has a backward pass of its own that also reaches the parameters of the
    others (some GANs), such new gradients say nothing: they are thrown away. Once that was seen,
    new gradients are not asked for any more.

    Args:
        optimizers: The number of optimizers.
    """

    def __init__(self, optimizers: int) -> None:
        self._all_optimizers = frozenset(range(optimizers))
        self._stepped: set[int] = set()
        self._counted_early = False
        self._about_to_step: set[int] = set()
        self._apart = False  # each has a backward pass of its own

    @property
    def stepped(self) -> list[int]:
        """Numbers of the optimizers that have stepped in an inner step that is still to count."""
        return [] if self._counted_early else sorted(self._stepped)

    def load(self, stepped: Collection[int]) -> None:
        """Continue in the middle of an inner step, in which these optimizers have stepped."""
        self._stepped = set(stepped) & self._all_optimizers

    def before(
        self,
        optimizer: int,
        done: Callable[[int], bool] = lambda _: False,
        replaced: Callable[[int], bool] = lambda _: False,
    ) -> bool:
        """Note that an optimizer is about to step.

        Returns whether that ends an inner step, in which others were skipped.

        Args:
            optimizer: The number of the optimizer.
            done: Returns whether another optimizer has already stepped with its present gradients.
                If so, that step belongs to the inner step that begins now.
            replaced: Returns whether the optimizer has other gradients than those with which it was
                about to step.
        """
        expected, self._about_to_step = self._about_to_step, set()
        if optimizer in expected and replaced(optimizer):
            # Its last step was a part of the same inner step as that of the other one, which has
            # been counted.
            self._stepped.clear()
            self._counted_early = False
            self._apart = True
        if optimizer not in self._stepped:
            return False
        self._stepped = {other for other in self._stepped if other != optimizer and done(other)}
        return self._not_counted_yet()

    def after(self, optimizer: int, waiting: Callable[[int], bool] = lambda _: False) -> bool:
        """Note that an optimizer has stepped. Returns whether that ends an inner step.

        Args:
            optimizer: The number of the optimizer.
            waiting: Returns whether another optimizer has new gradients, with which it is about to
                step. If so, its last step was a part of an earlier inner step, and it has not
                stepped in the present one yet.
        """
        self._stepped.add(optimizer)
        if self._stepped != self._all_optimizers:
            return False
        others = set() if self._apart else self._all_optimizers - {optimizer}
        self._about_to_step = {other for other in others if waiting(other)}
        self._stepped -= self._about_to_step
        if self._stepped == self._all_optimizers:
            self._stepped.clear()
        return self._not_counted_yet()

    def count_early(self) -> bool:
        """Count the inner step under way now, and not when it ends.

        Returns whether there is one that was not counted.
        """
        is_new = bool(self.stepped)
        self._counted_early |= is_new
        return is_new

    def end(self) -> bool:
        """Note that no more steps will come.

        Returns whether that ends an inner step that was not counted.
        """
        was_under_way = bool(self._stepped)
        self._stepped.clear()
        return was_under_way and self._not_counted_yet()

    def _not_counted_yet(self) -> bool:
        """Say whether the inner step that ends now was not counted early."""
        early, self._counted_early = self._counted_early, False
        return not early


_REASON = (
    "an outer loop (DiLoCo) counts the steps of this optimizer and syncs between them, outside of "
    "compiled code: compile the step without fullgraph=True"
)
# Of the frames that belong to what untraced() puts around a function.
_NAMES = frozenset({"untraced_hook", "_fn"})


def untraced(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that does the same, and is left out where torch.compile traces its caller.

    It costs next to nothing where nothing is compiled.
    """
    # Every optimizer has imported torch's compiler already, which takes a second.
    says_why = "reason" in inspect.signature(torch.compiler.disable).parameters  # not in torch 2.6
    outside = torch.compiler.disable(function, **({"reason": _REASON} if says_why else {}))  # type: ignore[no-untyped-call]

    def untraced_hook(*arguments: Any) -> None:
        if torch.compiler.is_compiling():
            outside(*arguments)
        else:
            function(*arguments)

    return untraced_hook
