"""The synced tensors and their fragments.

Each trainable parameter is synced once, and buffers according to a policy.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from .._arithmetic._layout import Rule
from .._checks import kind_of
from .._errors import ConfigurationError
from .._wire._safetensors import SAFETENSORS_DTYPES
from ._layers import Pattern, deal_out
from ._values import describe, is_plain, named_buffers, plain_name


class Buffers(StrEnum):
    """A sync's treatment of the model's persistent buffers (such as BatchNorm's statistics)."""

    MEAN = "mean"
    """Floating-point buffers become the mean over the replicas; others (counters) take rank 0's."""
    RANK0 = "rank0"
    """All buffers take the values of rank 0."""
    NONE = "none"
    """Each replica keeps its own buffers."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor to be synced.

    Attributes:
        name: Its first name in the model, without wrappers.
        tensor: The tensor itself (a parameter or a buffer).
        rule: How it is reduced.
        outer_group: The number of its outer parameter group; None if there are not several.
    """

    name: str
    tensor: torch.Tensor
    rule: Rule
    outer_group: int | None = None

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype of its global copy and of its bytes in the store.

        It is that of the tensor, or at least fp32 if the tensor is averaged.
        """
        dtype = self.tensor.dtype
        keeps_dtype = self.rule is Rule.FIRST or dtype.itemsize >= torch.float32.itemsize
        return dtype if keeps_dtype else torch.float32

    @property
    def wire_bytes(self) -> int:
        """Size of its global copy in bytes."""
        return self.tensor.numel() * self.wire_dtype.itemsize

    def describe(self) -> str:
        """Dtype, shape, rule and outer parameter group, as they are compared between replicas."""
        group = "" if self.outer_group is None else f" in outer group {self.outer_group}"
        return f"{describe(self.tensor)} {self.rule}{group}"


def split(
    model: torch.nn.Module,
    fragments: int | Pattern | Sequence[torch.nn.Module | Sequence[torch.nn.Module]],
    buffers: Buffers,
    outer_groups: Mapping[int, int] | None = None,
) -> list[list[NamedTensor]]:
    """Cut a model into fragments.

    A tensor with several names is taken once, under its first name. Buffers belong to the last
    fragment, so that each is synced once per cycle.

    Args:
        model: The model.
        fragments: A number (the parameters are cut in their order into parts of about equal size),
            a pattern in which the layers are dealt out, or a list of modules, or of lists of
            modules, each of which becomes a fragment; together they must hold all trainable
            parameters. One that several of them hold belongs to the first.
        buffers: What happens to the buffers.
        outer_groups: The number of every trainable parameter's outer parameter group, by the
            parameter's ``id``; None if there are not several.

    Raises:
        ConfigurationError: The model has no trainable parameter, or fewer than fragments; a
            parameter is in no fragment; a module is not part of the model, or adds nothing to the
            fragments before it; its layers do not fit a pattern; or a tensor cannot be synced.
    """
    check_shapes(model)
    group_of = outer_groups or {}
    trainable = [
        NamedTensor(plain_name(model, name), p, Rule.OUTER, group_of.get(id(p)))
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    if not trainable:
        raise ConfigurationError(
            "the model has no trainable parameter (requires_grad is False for all of them), so "
            "there is nothing to sync"
        )
    for tensor in trainable:
        _check(tensor)
    if isinstance(fragments, int):
        parts = _by_number(trainable, fragments)
    elif isinstance(fragments, Pattern):
        tensors = [named.tensor for named in trainable]
        parts = [
            [trainable[position] for position in part]
            for part in deal_out(model, tensors, fragments)
        ]
    else:
        parts = _by_module(model, trainable, fragments)
    return [*parts[:-1], parts[-1] + _buffers(model, buffers)]


def check_shapes(model: torch.nn.Module) -> None:
    """Refuse tensors without a shape, and names that cannot be saved."""
    for key, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        name = plain_name(model, key)
        kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
        if name == "__metadata__":
            raise ConfigurationError(
                f"{kind} {name!r} has a name that safetensors reserves for itself: give it another "
                "one"
            )
        if is_lazy(tensor):
            raise ConfigurationError(
                f"{kind} {name!r} does not have a shape yet: run a batch through the model first"
            )


def _check(named: NamedTensor) -> None:
    tensor = named.tensor
    if tensor.dtype not in {torch.bfloat16, torch.float16, torch.float32, torch.float64}:
        raise ConfigurationError(
            f"parameter {named.name!r} has dtype {tensor.dtype}, but only bfloat16, float16, "
            "float32 and float64 can be synced"
        )
    if type(tensor.detach()) is not torch.Tensor or tensor.layout is not torch.strided:
        raise ConfigurationError(
            f"parameter {named.name!r} is {kind_of(tensor.detach())} with layout {tensor.layout}, "
            "but only plain dense tensors can be synced (no DTensor, no sparse tensors)"
        )
    if tensor.is_meta:
        raise ConfigurationError(
            f"parameter {named.name!r} is on the meta device and has no values yet: load the "
            "model's values first"
        )
    if tensor.is_inference():
        raise ConfigurationError(
            f"parameter {named.name!r} was made inside torch.inference_mode() and cannot be "
            "written to: make the model outside that mode"
        )


def _check_buffer(name: str, buffer: torch.Tensor) -> None:
    obstacle = ""
    if buffer.is_complex():
        obstacle = "complex"
    elif not is_plain(buffer):
        obstacle = (
            f"{kind_of(buffer.detach())} with layout {buffer.layout} on device {buffer.device}"
        )
    elif buffer.is_inference():
        obstacle = "a tensor that was made inside torch.inference_mode() and cannot be written to"
    elif buffer.dtype not in SAFETENSORS_DTYPES:
        obstacle = f"of dtype {buffer.dtype}, which safetensors does not know"
    if obstacle:
        raise ConfigurationError(
            f"buffer {name!r} is {obstacle}, but only plain dense tensors of ordinary dtypes can "
            "be synced: pass buffers='none', and sync the buffers yourself if that is needed"
        )


def _by_number(trainable: list[NamedTensor], count: int) -> list[list[NamedTensor]]:
    if count < 1:
        raise ConfigurationError(f"fragments must be at least 1, not {count}")
    if count > len(trainable):
        raise ConfigurationError(
            f"the model has only {len(trainable)} trainable tensors, which is too few for {count} "
            "fragments: pass a smaller number"
        )
    total = sum(tensor.tensor.numel() for tensor in trainable)
    parts: list[list[NamedTensor]] = [[]]
    placed = 0  # number of elements in the parts so far
    for index, named in enumerate(trainable):
        # Begin the next part when this one has its share, or when each of the remaining parts needs
        # one of the remaining tensors.
        tensors_left = len(trainable) - index
        is_needed = tensors_left == count - len(parts)
        is_full = parts[-1] and placed + named.tensor.numel() / 2 > total * len(parts) / count
        if parts[-1] and len(parts) < count and (is_needed or is_full):
            parts.append([])
        parts[-1].append(named)
        placed += named.tensor.numel()
    return parts


def _by_module(
    model: torch.nn.Module,
    trainable: list[NamedTensor],
    modules: Sequence[torch.nn.Module | Sequence[torch.nn.Module]],
) -> list[list[NamedTensor]]:
    if not modules:
        raise ConfigurationError(
            "fragments is an empty list: pass at least one module, or a number of fragments"
        )
    unplaced = {id(named.tensor): named for named in trainable}
    module_ids = {id(module) for module in model.modules()}
    parts: list[list[NamedTensor]] = []
    for number, given in enumerate(modules):
        group: Sequence[Any] = given if isinstance(given, (list, tuple)) else [given]
        for module in group:
            if id(module) not in module_ids:
                raise ConfigurationError(
                    f"fragment {number} ({type(module).__name__}) is not a module of the model: "
                    "pass modules from model.modules()"
                )
        # pop(): a tensor that several fragments hold (one that is tied, or modules inside of each
        # other) belongs to the first, and takes one outer step per cycle.
        part = [
            unplaced.pop(id(p))
            for module in group
            for p in module.parameters()
            if id(p) in unplaced
        ]
        if not part:
            kinds = ", ".join(type(module).__name__ for module in group) or "an empty list"
            raise ConfigurationError(
                f"fragment {number} ({kinds}) holds no trainable parameter that is not in an "
                "earlier fragment: leave it out"
            )
        parts.append(part)
    if unplaced:
        names = ", ".join(repr(named.name) for named in unplaced.values())
        raise ConfigurationError(
            f"these trainable parameters are in no fragment: {names}. Add the modules that hold "
            "them, or freeze them."
        )
    return parts


def _buffers(model: torch.nn.Module, policy: Buffers) -> list[NamedTensor]:
    if policy is Buffers.NONE:
        return []
    parameter_names = {id(parameter): name for name, parameter in model.named_parameters()}
    buffers_by_id: dict[int, NamedTensor] = {}
    for key, buffer in named_buffers(model, persistent=True).items():
        if id(buffer) not in buffers_by_id:
            name = plain_name(model, key)
            if id(buffer) in parameter_names:
                raise ConfigurationError(
                    f"buffer {name!r} is the same tensor as parameter "
                    f"{parameter_names[id(buffer)]!r} and would be synced twice, by different "
                    "rules: register it only once"
                )
            _check_buffer(name, buffer)
            is_averaged = policy is Buffers.MEAN and buffer.is_floating_point()
            rule = Rule.MEAN if is_averaged else Rule.FIRST
            buffers_by_id[id(buffer)] = NamedTensor(name, buffer, rule)
    return list(buffers_by_id.values())
