"""Noticing that parameters are trained by an optimizer that the outer loop does not know.

Nothing would be synced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from .._errors import UnseenStepsError
from .._model._partition import NamedTensor
from .._model._values import sample
from ._steps import untraced

_LEAST = 10  # backward passes between two checks; many micro-batches may make one step
_MOST_VALUES = 4096


class UnseenChanges:
    """The check of a few parameters after many backward passes without an inner optimizer's step.

    A hook counts the backward passes that reach a parameter. With gradient accumulation there are
    several passes per step, between which values do not change, so the values are compared only
    once in ``max(sync_every, 10)`` passes without a step. If they have changed in two comparisons
    in a row, an unknown optimizer trains them. The hook costs about a microsecond per pass. Not
    thread-safe.

    Args:
        tensors: The tensors that are synced, of which a few trainable parameters are watched.
        sync_every: Number of inner steps between two syncs.
    """

    def __init__(self, tensors: Sequence[NamedTensor], sync_every: int) -> None:
        self._every = max(sync_every, _LEAST)
        self._watched = [_Watched(named) for named in _choose(tensors)]
        self._hooks = ExitStack()
        self._stepping = False

    def watch(self) -> None:
        """Begin to watch."""
        # Weak, since a hook lives as long as its parameter.
        count = weakref.WeakMethod(self.count)
        for number, watched in enumerate(self._watched):
            parameter = watched.named.tensor
            if parameter.requires_grad and parameter.is_leaf:
                hook = untraced(partial(_call, count, number))
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooks.callback(handle.remove)

    def stop(self) -> None:
        """Stop watching; repeatable."""
        self._hooks.close()

    def steps(self) -> None:
        """Note that an inner optimizer begins a step: passes of its closure do not count."""
        self._stepping = True

    def seen(self) -> None:
        """Note that an inner optimizer has stepped, or that a sync has written to the model."""
        self._stepping = False
        for watched in self._watched:
            watched.passes = watched.changes = 0
            watched.values = None

    def check(self) -> None:
        """At the end, refuse training that was done since the last step of an inner optimizer.

        Raises:
            UnseenStepsError: A parameter has changed in more than ``max(sync_every, 10)`` backward
                passes.
        """
        for watched in self._watched:
            if watched.passes > self._every and watched.has_changed():
                self._refuse(watched)

    def count(self, number: int) -> None:
        """Count a backward pass that has reached one of the parameters.

        Raises:
            UnseenStepsError: An optimizer that the outer loop does not know trains the parameter.
        """
        if self._stepping:
            return
        watched = self._watched[number]
        watched.passes += 1
        if watched.passes % self._every:
            return
        if watched.values is not None:
            watched.changes = watched.changes + 1 if watched.has_changed() else 0
            # A single change may have another reason, such as loading values.
            if watched.changes >= 2:
                self._refuse(watched)
        watched.values = watched.sample()

    @staticmethod
    def _refuse(watched: _Watched) -> None:
        raise UnseenStepsError(
            f"parameter {watched.named.name!r} is trained, but no inner optimizer of this outer "
            f"loop has stepped in the last {watched.passes} backward passes, so nothing is "
            "synced. Was the optimizer made again, or its step() replaced? Pass to DiLoCo(...) "
            "the optimizer that the training loop steps, and keep using it.",
            watched.named.name,
        )


@dataclass(eq=False)
class _Watched:
    """A parameter, and what has happened to it since the last step of an inner optimizer."""

    named: NamedTensor
    passes: int = 0
    changes: int = 0
    values: torch.Tensor | None = None

    def has_changed(self) -> bool:
        # torch's version counter would not show it, since fused optimizers do not increase it.
        return self.values is not None and not torch.equal(self.values, self.sample())

    def sample(self) -> torch.Tensor:
        values = sample(self.named.tensor, _MOST_VALUES).clone()
        return values.view(torch.uint8)  # compared as bytes, in which NaN equals NaN


def _call(method: Callable[[], Callable[[int], None] | None], number: int, _: object) -> None:
    act = method()
    if act is not None:
        act(number)


def _choose(tensors: Sequence[NamedTensor]) -> list[NamedTensor]:
    """A few parameters.

    A single one would not do: the loss may not always reach it, or it may be frozen later.
    """
    parameters = [
        named
        for named in tensors
        if isinstance(named.tensor, torch.nn.Parameter) and named.tensor.numel()
    ]
    if not parameters:
        return []
    chosen = [
        parameters[0],
        parameters[-1],
        min(parameters, key=lambda named: named.tensor.numel()),
    ]
    return list({id(named.tensor): named for named in chosen}.values())
