"""Several outer parameter groups: parts of a model whose outer steps have settings of their own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from .._errors import ConfigurationError
from .._terms._terms import OuterGroup
from ._learning_rate import lr_of_sync
from ._optimizer import make, outer_factory
from ._trial import try_out

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ._learning_rate import LearningRate
    from ._optimizer import OuterOptimizerFactory

_OF_SGD = {"lr": "outer_lr", "momentum": "outer_momentum", "nesterov": "nesterov"}


def outer_groups(
    groups: Sequence[Mapping[str, Any]] | None,
    optimizer: OuterOptimizerFactory | None,
    lr: float | LearningRate | None,
    momentum: float | None,
    nesterov: bool | None,
) -> list[OuterGroup]:
    """How the outer parameter groups are stepped: one for each of ``groups``, or a single one if that is None.

    Args:
        groups: Settings by name, besides ``"params"``; what a group leaves out is as the other arguments say.
        optimizer: As for :func:`outer_factory`, as are the following ones.
        lr: Learning rate.
        momentum: Momentum.
        nesterov: Whether the momentum is Nesterov's.

    Raises:
        ConfigurationError: A setting is not allowed, or the optimizer cannot take the outer steps. The message names the group.
    """
    factory = outer_factory(optimizer, lr, momentum, nesterov)
    found = []
    for number, group in enumerate([{}] if groups is None else groups):
        given = {key: value for key, value in group.items() if key != "params"}
        rate = given.get("lr", lr)
        schedule = rate if callable(rate) else None
        try:
            if schedule is not None:
                lr_of_sync(schedule, 1)
            if optimizer is None:
                _check_known(given, _OF_SGD)
                settings = dict(zip(_OF_SGD, (lr, momentum, nesterov), strict=True)) | given
                own = outer_factory(None, *settings.values()) if given else factory
            else:
                own = _with_settings(optimizer, given) if given else factory
                try_out(own)
        except ConfigurationError as error:
            if groups is None:
                raise
            raise ConfigurationError(f"outer_groups[{number}]: {_of_the_group(error)}") from error
        found.append(OuterGroup(own, schedule))
    return found


def _of_the_group(error: ConfigurationError) -> str:
    """The same sentence with the names that settings have in a group."""
    return re.sub(r"\bouter_(lr|momentum)\b", r"\1", str(error))


def _with_settings(
    optimizer: OuterOptimizerFactory, given: Mapping[str, Any]
) -> OuterOptimizerFactory:
    """The caller's function for one group: as torch's optimizers take them, with settings of the group's own."""
    # A function of the sync is no setting of the optimizer, whose own rate is replaced before every step.
    fixed = {key: value for key, value in given.items() if not (key == "lr" and callable(value))}

    def factory(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        group: Any = [{"params": parameters, **fixed}]
        return optimizer(group)

    probe = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    _check_known(given, make(factory, [probe]).defaults)
    return factory


def _check_known(given: Mapping[str, Any], known: Iterable[str]) -> None:
    # torch ignores settings that an optimizer does not know.
    for key in given:
        if key not in known:
            raise ConfigurationError(
                f"{key!r} is not a setting of the outer optimizer, which has {', '.join(map(repr, known))}"
            )
