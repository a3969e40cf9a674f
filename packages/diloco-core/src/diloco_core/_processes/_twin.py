"""A plain copy of a model on the CPU, over which the leader of a replica runs its outer loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch

from .._model._values import named_buffers, wrapped_in


class Twin:
    """A model with the same tensors as another, whole and without wrappers.

    It has the modules of the model under their names, which are empty but
    for what they hold: it cannot be called.

    Args:
        model: The model, of which this process may hold a part.
        wholes: What stands for each parameter, and each synced buffer, by the ``id`` of that.

    Attributes:
        model: The twin.
    """

    def __init__(self, model: torch.nn.Module, wholes: Mapping[int, torch.Tensor]) -> None:
        self._made: dict[int, Any] = dict(wholes)
        self.model = self._module(model)

    def translated(self, given: Any) -> Any:
        """Return a value in which modules and tensors of the twin stand for those of the model."""
        if isinstance(given, Mapping):
            return {name: self.translated(value) for name, value in given.items()}
        if isinstance(given, (torch.nn.Module, torch.Tensor)):
            return self._made.get(id(given), given)
        if isinstance(given, Iterable) and not isinstance(given, str):
            return [self.translated(each) for each in given]
        return given

    def _module(self, original: torch.nn.Module) -> torch.nn.Module:
        if id(original) in self._made:
            return self._made[id(original)]  # type: ignore[no-any-return]
        if (inside := wrapped_in(original)) is not None:
            twin = self._made[id(original)] = self._module(inside)
            return twin
        kind = next((one for one in _CONTAINERS if isinstance(original, one)), None)
        twin = self._made[id(original)] = (kind or _class_like(type(original)))()  # type: ignore[arg-type] # a class
        for name, parameter in original._parameters.items():  # noqa: SLF001
            twin.register_parameter(name, self._made.get(id(parameter)))
        buffers = original._buffers  # noqa: SLF001
        held = {n: self._made[id(b)] for n, b in buffers.items() if id(b) in self._made}
        # What is not synced is the leader's own, whatever becomes of it.
        twin._buffers = {**buffers, **held} if held else buffers  # noqa: SLF001
        twin._non_persistent_buffers_set = original._non_persistent_buffers_set  # noqa: SLF001
        for name, child in original._modules.items():  # noqa: SLF001
            twin.register_module(name, None if child is None else self._module(child))
        return twin


def named_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters of a model, and then the buffers that are saved with it, each once."""
    saved = {id(buffer) for buffer in named_buffers(model, persistent=True).values()}
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) in saved]
    return [*model.named_parameters(), *buffers]


def tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return :func:`named_tensors` without the names."""
    return [tensor for _, tensor in named_tensors(model)]


_CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential)


@cache
def _class_like(kind: type[Any]) -> type[torch.nn.Module]:
    """Return an empty class of the same name: layers are dealt out by their classes."""
    return type(kind.__name__, (torch.nn.Module,), {})
