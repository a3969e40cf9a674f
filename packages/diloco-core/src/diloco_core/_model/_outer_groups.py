"""Which parameter belongs to which outer parameter group (the argument ``outer_groups``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .._checks import kind_of
from .._errors import ConfigurationError
from ._names import plain_name

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_GROUPS = 8
"""The most outer parameter groups: keys in the store hold a learning rate for each of them, and a file's name is limited."""


def checked_groups(given: object) -> Sequence[Mapping[str, Any]] | None:
    """The argument ``outer_groups``, if it is a list of groups; None if it is None.

    Raises:
        ConfigurationError: It is something else.
    """
    if given is None:
        return None
    if not isinstance(given, (list, tuple)) or not given:
        raise ConfigurationError(
            'outer_groups must be a list of groups, such as [{"params": model.embedding.parameters(), "lr": 0.4}, ...], not '
            f"{'an empty list' if given in ([], ()) else kind_of(given)}"
        )
    if len(given) > MOST_GROUPS:
        raise ConfigurationError(
            f"outer_groups has {len(given)} groups, but there can be at most {MOST_GROUPS}: join groups with the same "
            "settings"
        )
    for number, group in enumerate(given):
        if not isinstance(group, Mapping) or "params" not in group:
            problem = 'has no "params"' if isinstance(group, Mapping) else f"is {kind_of(group)}"
            raise ConfigurationError(
                f'outer_groups[{number}] {problem}, but every group must be a mapping with "params": parameters or modules of '
                "the model"
            )
    return given


def group_of_parameters(
    model: torch.nn.Module, groups: Sequence[Mapping[str, Any]]
) -> dict[int, int]:
    """The number of the group of every trainable parameter, by the parameter's ``id``.

    Args:
        model: The model.
        groups: The groups; the ``"params"`` of each are a parameter, a module, or several of them.

    Raises:
        ConfigurationError: A trainable parameter is in no group or in several, a group has none, or something else is in it.
    """
    named = {id(p): plain_name(model, name) for name, p in model.named_parameters()}
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    group_of: dict[int, int] = {}
    for number, group in enumerate(groups):
        found = 0
        for parameter in _parameters(group["params"], number):
            name = named.get(id(parameter))
            if name is None:
                raise ConfigurationError(
                    f"outer_groups[{number}] holds a parameter of shape {list(parameter.shape)} that is not in the model: pass "
                    "parameters of model.parameters(), or modules of model.modules()"
                )
            before = group_of.setdefault(id(parameter), number)
            if before != number:
                raise ConfigurationError(
                    f"parameter {name!r} is in outer_groups[{before}] and in outer_groups[{number}], but every parameter must be "
                    "in exactly one group (a tied parameter too, which several modules hold)"
                )
            found += id(parameter) in trainable
        if not found:
            raise ConfigurationError(
                f"outer_groups[{number}] holds no trainable parameter: leave it out"
            )
    missing = [name for key, name in named.items() if key in trainable and key not in group_of]
    if missing:
        raise ConfigurationError(
            f"these trainable parameters are in no group of outer_groups: {', '.join(map(repr, missing))}. Add them to one, or "
            "freeze them"
        )
    return group_of


def _parameters(given: object, number: int) -> list[torch.nn.Parameter]:
    if isinstance(given, torch.nn.Module):
        return list(given.parameters())
    if isinstance(given, torch.nn.Parameter):
        return [given]
    # A tensor can be iterated over, but its elements are no parameters.
    if not isinstance(given, Iterable) or isinstance(given, (str, torch.Tensor, Mapping)):
        raise ConfigurationError(
            f'the "params" of outer_groups[{number}] must be parameters or modules of the model, not {kind_of(given)}'
        )
    if isinstance(given, (set, frozenset)):
        raise ConfigurationError(
            f'the "params" of outer_groups[{number}] must be in an order that is the same on all replicas, but a set has none: '
            "pass a list"
        )
    return [parameter for each in given for parameter in _parameters(each, number)]
