"""Noticing the steps of the inner optimizers through hooks."""

from __future__ import annotations

import sys
import threading
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .._errors import ConfigurationError
from ._untraced import is_of_a_wrapper, untraced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from torch.utils.hooks import RemovableHandle

_lock = threading.Lock()
# Weak on both sides, since an InnerSteps refers to its optimizers, and through the outer loop to a model. The hooks keep it
# alive.
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
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(
                f"inner_optimizer must be a torch.optim.Optimizer or a list of them, not {optimizer!r}"
            )
        if not (
            hasattr(optimizer, "_optimizer_step_pre_hooks")
            and getattr(type(optimizer).step, "hooked", False)
        ):
            raise ConfigurationError(
                f"the steps of {type(optimizer).__name__} cannot be counted, since it was made without the constructor of "
                "torch.optim.Optimizer: pass the optimizer that it wraps. If it writes weights of its own into the model, as "
                "Lookahead does, leave it out and step the other one: every sync would be undone, and nobody would notice"
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
    """Calls one function before each step of some optimizers, and another one after it. Not thread-safe.

    Only one outer loop at a time watches an optimizer. A loop that was never entered gives way to the next one that is made.

    Args:
        optimizers: The optimizers to watch.
        before: Called with the number of an optimizer before each of its steps.
        after: Called with the number of an optimizer after each of its steps.

    Attributes:
        in_use: Whether the outer loop has been entered, so that another one must not take over its optimizers.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    before: Callable[[int], None]
    after: Callable[[int], None]

    def __post_init__(self) -> None:
        self.in_use = False
        self._handles: list[RemovableHandle] = []
        self._under_way: dict[int, FrameType] = {}
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
                    "another outer loop is using this inner optimizer: leave the block of that loop before you make the next one"
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

    # If a class overrides step() and calls that of its parent, torch calls the hooks for both. Only the outer call is a step.
    # It is recognized by the frame that calls the hooks: torch's wrapper, or what torch.compile has made of its parts, which
    # call each other.

    def _begins(self, number: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # A fused optimizer is called by a gradient scaler for a step that it skips, too. Reading what the scaler has found waits
        # for the device, as the scaler itself does before the step of an optimizer that is not fused.
        if bool(getattr(optimizer, "found_inf", False)):
            return
        caller = _caller()
        # A call that an exception has ended is not on the stack any more, and does not count.
        if _is_on_stack(self._under_way.get(number), caller):
            self._inside[number] += 1
            return
        self._under_way[number], self._inside[number] = caller, 0
        self.before(number)

    def _ends(self, number: int, *_: Any) -> None:
        frame, caller = self._under_way.get(number), _caller()
        if frame is not caller and (self._inside[number] or not _is_on_stack(frame, caller)):
            self._inside[number] = max(0, self._inside[number] - 1)
            return
        del self._under_way[number]
        if len(self.optimizers) > 1:
            self._remember_gradient(number)
        self.after(number)

    def describe(self, number: int) -> str:
        """How messages name an optimizer."""
        return f"inner optimizer {number} ({type(self.optimizers[number]).__name__})"

    def has_used_gradient(self, number: int) -> bool:
        """Whether an optimizer still has the gradients that it has used in its last step."""
        if number not in self._used:
            return False
        parameter, used_gradient, version = self._used[number]
        gradient = parameter.grad
        return (
            gradient is not None and gradient is used_gradient() and gradient._version == version  # noqa: SLF001 - torch has no public way
        )

    def has_new_gradient(self, number: int) -> bool:
        """Whether an optimizer has gradients that it has not used yet, so that it is about to step; and remember which."""
        gradient = self._used[number][0].grad if number in self._used else None
        if gradient is None or self.has_used_gradient(number):
            return False
        self._new[number] = weakref.ref(gradient)
        # Zeros are not new gradients: zero_grad(set_to_none=False) has written them.
        return gradient.layout is not torch.strided or bool(gradient.any())

    def has_replaced_gradient(self, number: int) -> bool:
        """Whether an optimizer has other gradients than when it had new ones: zero_grad() has thrown those away."""
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
    while is_of_a_wrapper(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_on_stack(frame: FrameType | None, top: FrameType | None) -> bool:
    """Whether a frame is ``top``, or one of its callers."""
    while top is not None and frame is not None:
        if top is frame:
            return True
        top = top.f_back
    return False
