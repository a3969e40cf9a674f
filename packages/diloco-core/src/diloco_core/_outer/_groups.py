"""Several outer parameter groups: parts of a model whose outer steps have settings of their own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from .._arithmetic._layout import Piece
from .._checks import kind_of, number, yes_or_no
from .._errors import ConfigurationError
from .._generators import undisturbed
from .._model._values import plain_name
from .._terms._terms import OuterGroup
from ._optimizer import (
    LearningRate,
    OuterOptimizer,
    OuterOptimizerFactory,
    checked_lr,
    lr_of_sync,
    make,
)

_MOST_GROUPS = 8
"""The largest number of outer parameter groups.

Keys in the store hold a learning rate for each of them, and a file's name is limited.
"""
_OF_SGD = {"lr": "outer_lr", "momentum": "outer_momentum", "nesterov": "nesterov"}


def checked_groups(given: object) -> Sequence[Mapping[str, Any]] | None:
    """The argument ``outer_groups``, if it is a list of groups; None if it is None.

    Raises:
        ConfigurationError: It is something else.
    """
    if given is None:
        return None
    if not isinstance(given, (list, tuple)) or not given:
        raise ConfigurationError(
            'outer_groups must be a list of groups, such as [{"params": '
            'model.embedding.parameters(), "lr": 0.4}, ...], not '
            f"{'an empty list' if given in ([], ()) else kind_of(given)}"
        )
    if len(given) > _MOST_GROUPS:
        raise ConfigurationError(
            f"outer_groups has {len(given)} groups, but there can be at most {_MOST_GROUPS}: join "
            "groups with the same settings"
        )
    for index, group in enumerate(given):
        if not isinstance(group, Mapping) or "params" not in group:
            problem = 'has no "params"' if isinstance(group, Mapping) else f"is {kind_of(group)}"
            raise ConfigurationError(
                f"outer_groups[{index}] {problem}, but every group must be a mapping with "
                '"params": parameters or modules of the model'
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
        ConfigurationError: A trainable parameter is in no group or in several, a group has none, or
            something else is in it.
    """
    named = {id(p): plain_name(model, name) for name, p in model.named_parameters()}
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    group_of: dict[int, int] = {}
    for index, group in enumerate(groups):
        count = 0
        for parameter in _parameters(group["params"], index):
            name = named.get(id(parameter))
            if name is None:
                raise ConfigurationError(
                    f"outer_groups[{index}] holds a parameter of shape {list(parameter.shape)} "
                    "that is not in the model: pass parameters of model.parameters(), or modules "
                    "of model.modules()"
                )
            before = group_of.setdefault(id(parameter), index)
            if before != index:
                raise ConfigurationError(
                    f"parameter {name!r} is in outer_groups[{before}] and in "
                    f"outer_groups[{index}], but every parameter must be in exactly one group (a "
                    "tied parameter too, which several modules hold)"
                )
            count += id(parameter) in trainable
        if not count:
            raise ConfigurationError(
                f"outer_groups[{index}] holds no trainable parameter: leave it out"
            )
    missing = [name for key, name in named.items() if key in trainable and key not in group_of]
    if missing:
        raise ConfigurationError(
            "these trainable parameters are in no group of outer_groups: "
            f"{', '.join(map(repr, missing))}. Add them to one, or freeze them"
        )
    return group_of


def _parameters(given: object, index: int) -> list[torch.nn.Parameter]:
    if isinstance(given, torch.nn.Module):
        return list(given.parameters())
    if isinstance(given, torch.nn.Parameter):
        return [given]
    # A tensor can be iterated over, but its elements are no parameters.
    if not isinstance(given, Iterable) or isinstance(given, (str, torch.Tensor, Mapping)):
        raise ConfigurationError(
            f'the "params" of outer_groups[{index}] must be parameters or modules of the model, '
            f"not {kind_of(given)}"
        )
    if isinstance(given, (set, frozenset)):
        raise ConfigurationError(
            f'the "params" of outer_groups[{index}] must be in an order that is the same on all '
            "replicas, but a set has none: pass a list"
        )
    return [parameter for each in given for parameter in _parameters(each, index)]


def outer_factory(
    optimizer: OuterOptimizerFactory | None,
    lr: float | LearningRate | None,
    momentum: float | None,
    nesterov: bool | None,
) -> OuterOptimizerFactory:
    """Return the function that makes the outer optimizer.

    It is the caller's own, or one for fused SGD (one pass over the memory).

    Args:
        optimizer: The caller's function, or None for SGD.
        lr: Learning rate of the SGD, or a function of the sync; 0.7 if None.
        momentum: Momentum of the SGD; 0.9 if None.
        nesterov: Whether the momentum is Nesterov's; True if None and there is momentum.

    Raises:
        ConfigurationError: A value is out of range, or settings of the SGD are given together with
            a function.
    """
    if optimizer is not None:
        settings = {"outer_lr": lr, "outer_momentum": momentum, "nesterov": nesterov}
        given = [
            f"{name}={value!r}"
            for name, value in settings.items()
            if value is not None and not (name == "outer_lr" and callable(value))
        ]
        if given:
            raise ConfigurationError(
                f"{', '.join(given)} cannot be given together with outer_optimizer: these are "
                "settings of the SGD that is used without it. Leave them out, and set the learning "
                "rate and momentum of your optimizer where it is made."
            )
        if not callable(optimizer):
            raise ConfigurationError(
                "outer_optimizer must be a function that makes an optimizer from a list of "
                "parameters, such as lambda parameters: torch.optim.SGD(parameters, lr=0.7), not "
                f"{kind_of(optimizer)}"
            )
        return optimizer
    first = lr_of_sync(lr, 1) if callable(lr) else checked_lr("outer_lr", 0.7 if lr is None else lr)
    momentum = number("outer_momentum", 0.9 if momentum is None else momentum)
    nesterov = yes_or_no("nesterov", momentum > 0 if nesterov is None else nesterov)
    if not 0 <= momentum < 1:
        raise ConfigurationError(
            f"outer_momentum must be at least 0 and less than 1, not {momentum}; a usual value is "
            "0.9"
        )
    if nesterov and not momentum:
        raise ConfigurationError(
            "nesterov=True has no effect with outer_momentum=0: leave nesterov out, or choose a "
            "momentum above 0, such as 0.9"
        )
    return partial(torch.optim.SGD, lr=first, momentum=momentum, nesterov=nesterov, fused=True)


def outer_groups(
    groups: Sequence[Mapping[str, Any]] | None,
    optimizer: OuterOptimizerFactory | None,
    lr: float | LearningRate | None,
    momentum: float | None,
    nesterov: bool | None,
) -> list[OuterGroup]:
    """Return an outer parameter group for each of ``groups``, or a single one if that is None.

    Args:
        groups: Settings by name, besides ``"params"``; what a group leaves out is as the other
            arguments say.
        optimizer: As for :func:`outer_factory`, as are the following ones.
        lr: Learning rate.
        momentum: Momentum.
        nesterov: Whether the momentum is Nesterov's.

    Raises:
        ConfigurationError: A setting is not allowed, or the optimizer cannot take the outer steps.
            The message names the group.
    """
    factory = outer_factory(optimizer, lr, momentum, nesterov)
    usual = dict(zip(_OF_SGD, (lr, momentum, nesterov), strict=True))
    for name, value in usual.items():
        if value is not None and groups and all(name in group for group in groups):
            raise ConfigurationError(
                f"{_OF_SGD[name]}={value!r} has no effect, since every group of outer_groups has a "
                f"{name!r} of its own: leave it out, or leave {name!r} out of a group"
            )
    found = []
    for index, group in enumerate([{}] if groups is None else groups):
        given = {key: value for key, value in group.items() if key != "params"}
        rate = given.get("lr", lr)
        schedule = rate if callable(rate) else None
        try:
            if schedule is not None:
                lr_of_sync(schedule, 1)
            if optimizer is None:
                _check_known(given, _OF_SGD)
                settings = usual | given
                own = outer_factory(None, *settings.values()) if given else factory
            else:
                own = _with_settings(optimizer, given) if given else factory
                try_out(own)
        except ConfigurationError as error:
            if groups is None:
                raise
            # In a group, the settings have names of their own.
            problem = re.sub(r"\bouter_(lr|momentum)\b", r"\1", str(error))
            raise ConfigurationError(f"outer_groups[{index}]: {problem}") from error
        found.append(OuterGroup(own, schedule))
    return found


def _with_settings(
    optimizer: OuterOptimizerFactory, given: Mapping[str, Any]
) -> OuterOptimizerFactory:
    """Return the caller's function for one group, with settings of the group's own.

    The group is passed to it as torch's optimizers take groups.
    """
    # A function of the sync is no setting of the optimizer: its rate is replaced before every step.
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
                f"{key!r} is not a setting of the outer optimizer, which has "
                f"{', '.join(map(repr, known))}"
            )


_NUMEL = 97
# Where the tensor is cut. Shards and chunks begin at multiples of 16, so that vectorised kernels
# round equally in all of them.
_PIECES = [Piece(0, start, stop) for start, stop in pairwise((0, 16, 64, _NUMEL))]
# How large the gradients of each step are: a limit on norms has no effect on small gradients, and
# shows with large ones.
_SCALES = (1.0, 1e-3, 1e3, 0.0, 1e6, 1.0)
_SAVED_AFTER = 3
_SEED = 20231114


def try_out(factory: OuterOptimizerFactory) -> None:
    """Refuse an optimizer that cannot take the outer steps of shards.

    The state of the caller's random generators does not change.

    Args:
        factory: Makes the optimizer from a list of parameters.

    Raises:
        ConfigurationError: The optimizer cannot be made, cannot step, is not element-wise, or keeps
            a state that cannot be published.
    """
    # On the CPU, whatever torch's default device is, since outer steps are taken on the CPU.
    with undisturbed(), torch.device("cpu"):
        generator = torch.Generator("cpu").manual_seed(_SEED)
        start = torch.randn(_NUMEL, generator=generator, dtype=torch.float32)
        gradients = [
            torch.randn(_NUMEL, generator=generator, dtype=torch.float32) * scale
            for scale in _SCALES
        ]
        expected = _steps_of_whole(factory, start, gradients)
        values = start.clone()
        outer, moved = (OuterOptimizer([OuterGroup(factory)]) for _ in range(2))
        _compare_steps(outer, values, gradients[:_SAVED_AFTER], expected[:_SAVED_AFTER])
        _check_state(outer)
        moved_values = values.clone()  # of another replica, which takes over the pieces
        for piece in _PIECES:
            state = {name: tensor.clone() for name, tensor in outer.tensors(piece).items()}
            part = moved_values[piece.start : piece.stop]
            moved.install(piece, part, state, outer.scalars(piece))
        later_gradients, later_expected = gradients[_SAVED_AFTER:], expected[_SAVED_AFTER:]
        when = "after its state was saved and loaded"
        _compare_steps(outer, values, later_gradients, later_expected)
        _compare_steps(moved, moved_values, later_gradients, later_expected, when)


def _steps_of_whole(
    factory: OuterOptimizerFactory, start: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The values after each step of an optimizer that has all of them in one tensor."""
    parameter = torch.nn.Parameter(start.clone())
    optimizer = make(factory, [parameter])
    values_by_step = []
    for gradient in gradients:
        parameter.grad = gradient.clone()
        with _named(type(optimizer).__name__):
            optimizer.step()
        values_by_step.append(parameter.detach().clone())
    return values_by_step


def _compare_steps(
    outer: OuterOptimizer,
    values: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    when: str = "",
) -> None:
    """Take the same steps piece by piece, and compare the values with those of the whole tensor."""
    for gradient, expected_values in zip(gradients, expected, strict=True):
        for piece in _PIECES:
            part = slice(piece.start, piece.stop)
            with _named(outer.name):
                outer.step(piece, values[part], gradient[part].clone())
        if not torch.allclose(values, expected_values, rtol=1e-5, atol=1e-7, equal_nan=True):
            problem = (
                f"gives other values {when}: something that its steps depend on is not in its state"
                if when
                else "is not element-wise: it gives other values for a tensor that is cut into "
                "pieces than for the whole tensor"
            )
            raise ConfigurationError(
                f"the outer optimizer {outer.name} {problem}. Each replica updates only a part of "
                "the values, so the update of an element must depend only on that element's "
                "gradients and state: use an optimizer without norms, trust ratios and clipping."
            )


def _check_state(outer: OuterOptimizer) -> None:
    for piece in _PIECES:
        for name, value in outer.state(piece).items():
            if isinstance(value, torch.Tensor) and value.dim():
                fits = value.shape == (piece.numel,) and value.dtype is torch.float32
                description = f"a tensor of shape {list(value.shape)} and dtype {value.dtype}"
            else:
                fits = value is None or _is_number(value)
                description = f"{kind_of(value)}"
            if not isinstance(name, str) or not fits:
                raise ConfigurationError(
                    f"the outer optimizer {outer.name} keeps {name!r}, {description}, in its state "
                    f"of {piece.numel} float32 values, but only numbers, and tensors with the "
                    "shape and dtype of the values, can be published: use another optimizer"
                )


def _is_number(value: object) -> bool:
    try:
        float(value)  # type: ignore[arg-type] # to find out whether this works
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str)


@contextmanager
def _named(optimizer: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ConfigurationError(
            f"the outer optimizer {optimizer} cannot take a step on a dense one-dimensional "
            f"tensor, which it must be able to do: {type(error).__name__}: {error}"
        ) from error
