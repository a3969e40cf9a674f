"""Whether parameters are trained while no step of the inner optimizers is seen: by an optimizer that nobody was told of."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from .._errors import UnseenStepsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.utils.hooks import RemovableHandle

    from .._model._partition import NamedTensor

_LEAST = 10  # backward passes between two looks; many micro-batches may make one step
_MOST_VALUES = 4096


class UnseenChanges:
    """Looks at a few parameters when many backward passes have come since the last step that was seen.

    A hook counts the backward passes that reach a parameter. With gradient accumulation there are several for a step, and
    values stay as they are in between; so they are looked at every ``max(sync_every, 10)`` passes only. Where they
    have changed between two looks, twice in a row, somebody else trains. A pass costs about a microsecond; values are read
    only after so many passes without a step. Not thread-safe.

    Args:
        tensors: What is synced; trainable parameters among it are watched.
        sync_every: How often a sync is due.
    """

    def __init__(self, tensors: Sequence[NamedTensor], sync_every: int) -> None:
        self._every = max(sync_every, _LEAST)
        self._watched = [_Watched(named) for named in _choice(tensors)]
        self._handles: list[RemovableHandle] = []
        self._stepping = False

    def watch(self) -> None:
        """Begin."""
        for watched in self._watched:
            parameter = watched.named.tensor
            if parameter.requires_grad and parameter.is_leaf:
                hook = _Hook(self, watched)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """End; repeatable."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def steps(self) -> None:
        """An inner optimizer begins a step: the backward passes of its closure, and what they change, are its own."""
        self._stepping = True

    def seen(self) -> None:
        """An inner optimizer has stepped, or a sync has written to the model."""
        self._stepping = False
        for watched in self._watched:
            watched.passes = watched.changes = 0
            watched.values = None

    def check(self) -> None:
        """At the end: refuse what was trained since the last step that was seen.

        Raises:
            UnseenStepsError: A parameter has changed, over more than ``max(sync_every, 10)`` backward passes.
        """
        for watched in self._watched:
            if (
                watched.values is not None
                and watched.passes > self._every
                and watched.has_changed()
            ):
                self._refuse(watched)

    def count(self, watched: _Watched) -> None:
        """A backward pass has come to a parameter.

        Raises:
            UnseenStepsError: Another optimizer trains it.
        """
        if self._stepping:
            return
        watched.passes += 1
        if watched.passes % self._every:
            return
        if watched.values is not None:
            watched.changes = watched.changes + 1 if watched.has_changed() else 0
            if watched.changes >= 2:  # once may be something else, such as values that were loaded
                self._refuse(watched)
        watched.look()

    @staticmethod
    def _refuse(watched: _Watched) -> None:
        raise UnseenStepsError(
            f"parameter {watched.named.name!r} is trained, but no inner optimizer of this outer loop has stepped in the last "
            f"{watched.passes} backward passes, so nothing is synced. Was the optimizer made anew, or its step() replaced? Pass "
            "the optimizer that the training loop steps to DiLoCo(...), and keep it.",
            watched.named.name,
        )


class _Watched:
    """A parameter, and what was seen of it since the last step of an inner optimizer."""

    def __init__(self, named: NamedTensor) -> None:
        self.named = named
        self.passes = 0
        self.changes = 0
        self.values: torch.Tensor | None = None

    def look(self) -> None:
        self.values = self._some()

    def has_changed(self) -> bool:
        # Not by torch's version counter, which fused optimizers leave as it is.
        return self.values is not None and not torch.equal(self.values, self._some())

    def _some(self) -> torch.Tensor:
        flat = self.named.tensor.detach().reshape(-1)
        values = flat[:: max(1, flat.numel() // _MOST_VALUES)].clone()
        return values.view(torch.uint8)  # bit by bit: NaN is the same as NaN


class _Hook:
    """Holds on to nothing: a hook lives as long as its parameter."""

    def __init__(self, owner: UnseenChanges, watched: _Watched) -> None:
        self._owner = weakref.ref(owner)
        self._watched = weakref.ref(watched)

    def __call__(self, _: torch.Tensor) -> None:
        owner, watched = self._owner(), self._watched()
        if owner is not None and watched is not None:
            owner.count(watched)


def _choice(tensors: Sequence[NamedTensor]) -> list[NamedTensor]:
    """A few parameters: one that the loss does not always reach, or that is frozen later, must not decide alone."""
    parameters = [
        n for n in tensors if isinstance(n.tensor, torch.nn.Parameter) and n.tensor.numel()
    ]
    if not parameters:
        return []
    few = [parameters[0], parameters[-1], min(parameters, key=lambda named: named.tensor.numel())]
    return list({id(named.tensor): named for named in few}.values())
