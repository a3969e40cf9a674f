"""The repeated layers of a model, dealt out to fragments (Streaming DiLoCo, arXiv 2501.18512)."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._errors import ConfigurationError
from ._values import plain_name

STRIDED = "strided"
SEQUENTIAL = "sequential"
PATTERNS = (STRIDED, SEQUENTIAL)
LAYERS_PER_FRAGMENT = 3
"""In each fragment, at most, if the number of fragments is not given.

It is the number that the paper uses.
"""

_BY_HAND = (
    "pass the fragments yourself: a list of modules, or of lists of modules, each of which becomes "
    "a fragment, such as fragments=[[model.embed, model.layers[0]], [model.layers[1], model.head]]"
)

_log = logging.getLogger("diloco_core")


@dataclass(frozen=True, slots=True)
class Pattern:
    """Deal out the layers of a model to fragments.

    Attributes:
        kind: ``"strided"`` (layer n goes into fragment n modulo their number) or ``"sequential"``
            (neighbours stay together).
        count: The number of fragments; None for three layers in each.
    """

    kind: str
    count: int | None = None

    def __str__(self) -> str:
        """As it is given to the outer loop."""
        return repr(self.kind if self.count is None else (self.kind, self.count))

    def fragment_of(self, layer: int, layers: int, fragments: int) -> int:
        """The fragment of a layer, by its number among all layers."""
        return layer % fragments if self.kind == STRIDED else layer * fragments // layers


class _Layers(NamedTuple):
    """The layers in one ModuleList or Sequential that hold synced tensors of their own."""

    name: str
    layers: Sequence[torch.nn.Module]

    def __str__(self) -> str:
        return f"{self.name!r} ({len(self.layers)} {type(self.layers[0]).__name__})"


def deal_out(
    model: torch.nn.Module, parameters: Sequence[torch.Tensor], pattern: Pattern
) -> list[list[int]]:
    """Return which parameters each fragment gets: their positions in ``parameters``, in order.

    Parameters that are in no layer go into the first fragment if they come before those of the
    layers (embeddings), and into the last one otherwise (a final norm, the head). A parameter that
    is tied to one outside the layers counts as one outside. Layers without a parameter of their
    own, such as frozen ones, are not counted.

    Args:
        model: The model.
        parameters: What is synced, in the order of the model, each tensor once.
        pattern: How it is dealt out.

    Raises:
        ConfigurationError: The model has no list of layers for this, or several, or too few layers.
    """
    stack = _repeated_layers(model, {id(parameter) for parameter in parameters}, pattern)
    number = len(stack.layers)
    count = pattern.count or math.ceil(number / LAYERS_PER_FRAGMENT)
    if count > number:
        raise ConfigurationError(
            f"fragments={pattern} needs {count} layers with trainable parameters of their own, but "
            f"{stack} has only {number} of them: pass a smaller number"
        )
    fragments: dict[int, int] = {}
    for index, layer in enumerate(stack.layers):
        for parameter in layer.parameters():
            fragments.setdefault(id(parameter), pattern.fragment_of(index, number, count))
    for outside in _outside(model, stack.layers):
        fragments.pop(id(outside), None)
    parts: list[list[int]] = [[] for _ in range(count)]
    other = 0  # the fragment of what is not in a layer
    for position, tensor in enumerate(parameters):
        if id(tensor) in fragments:
            other = count - 1
        parts[fragments.get(id(tensor), other)].append(position)
    _log.info("fragments=%s: the layers in %s are dealt out to %d fragments", pattern, stack, count)
    return parts


def _repeated_layers(model: torch.nn.Module, synced: set[int], pattern: Pattern) -> _Layers:
    """The longest list of layers of the same class.

    Lists inside of a layer (experts, for example) are part of that layer.
    """
    lists: list[_Layers] = []
    seen: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in seen or not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
            continue
        if len({type(child) for child in module}) != 1:
            continue
        elsewhere = {id(parameter) for parameter in _outside(model, list(module))}
        layers: list[torch.nn.Module] = []
        for child in module:
            own_parameters = {id(p) for p in child.parameters() if id(p) in synced} - elsewhere
            if own_parameters:
                layers.append(child)
                # What later layers hold, too, belongs to this one.
                elsewhere |= own_parameters
        if len(layers) > 1:
            lists.append(_Layers(plain_name(model, path), layers))
            seen.update(id(inside) for inside in module.modules())
    if not lists:
        raise ConfigurationError(
            f"fragments={pattern} needs the repeated layers of the model: a ModuleList or "
            "Sequential of at least two modules of the same class with trainable parameters. This "
            f"model has none: {_BY_HAND}"
        )
    longest = max(lists, key=lambda candidate: len(candidate.layers))
    rivals = [
        candidate
        for candidate in lists
        if len(candidate.layers) == len(longest.layers)
        or type(candidate.layers[0]) is type(longest.layers[0])
    ]
    if len(rivals) > 1:
        raise ConfigurationError(
            f"fragments={pattern} needs one list of repeated layers, but the model has several: "
            f"{', '.join(map(str, rivals))}. So {_BY_HAND}"
        )
    return longest


def _outside(model: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """The parameters that modules outside the layers hold."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    return [
        parameter
        for module in model.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    ]
