"""Which tensors are synced, and in which fragment: trainable parameters once each, and buffers by a declared policy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from .._arithmetic._layout import Rule
from .._checks import kind_of
from .._errors import ConfigurationError
from .._wire._safetensors import SAFETENSORS_DTYPES
from ._names import plain_name
from ._values import named_buffers

if TYPE_CHECKING:
    from collections.abc import Sequence


class Buffers(StrEnum):
    """What a sync does with the model's persistent buffers (BatchNorm's running statistics, say)."""

    MEAN = "mean"
    """Floating-point buffers become the mean over the replicas, others (counters) those of rank 0."""
    RANK0 = "rank0"
    """All become those of rank 0."""
    NONE = "none"
    """They stay as they are on each replica."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor to be synced.

    Attributes:
        name: Its first name in the model, without wrappers.
        tensor: The tensor itself (a parameter or a buffer).
        rule: How it is reduced.
    """

    name: str
    tensor: torch.Tensor
    rule: Rule

    @property
    def wire_dtype(self) -> torch.dtype:
        """Dtype of its global copy and its bytes in the store: its own, or at least fp32 where replicas are summed."""
        own = self.tensor.dtype
        return (
            own
            if self.rule is Rule.FIRST or own.itemsize >= torch.float32.itemsize
            else torch.float32
        )

    @property
    def wire_bytes(self) -> int:
        """Size of its global copy in bytes."""
        return self.tensor.numel() * self.wire_dtype.itemsize

    def describe(self) -> str:
        """Shape and dtype, as compared between replicas."""
        return (
            f"{str(self.tensor.dtype).removeprefix('torch.')}{list(self.tensor.shape)} {self.rule}"
        )


def split(
    model: torch.nn.Module,
    fragments: int | Sequence[torch.nn.Module],
    buffers: Buffers,
) -> list[list[NamedTensor]]:
    """Cut a model into fragments.

    A tensor that appears under several names is taken once, under its first. Buffers go with the last fragment, so that
    each is synced once per cycle.

    Args:
        model: The model.
        fragments: A number (parameters are cut in order into parts of about equal size), or the modules that make up one
            fragment each; together they must hold every trainable parameter.
        buffers: What happens to the buffers.

    Raises:
        ConfigurationError: No trainable parameter; more fragments than parameters; a parameter is in no fragment; a
            module is not part of the model; a tensor cannot be synced.
    """
    _check_shapes(model)
    trainable = [
        NamedTensor(plain_name(model, name), p, Rule.OUTER)
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    if not trainable:
        raise ConfigurationError(
            "the model has no trainable parameter (requires_grad is False for all)"
        )
    for tensor in trainable:
        _check(tensor)
    parts = (
        _by_number(trainable, fragments)
        if isinstance(fragments, int)
        else _by_module(model, trainable, fragments)
    )
    return [*parts[:-1], parts[-1] + _buffers(model, buffers)]


def _check_shapes(model: torch.nn.Module) -> None:
    for kind, tensors in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        for key, tensor in tensors:
            name = plain_name(model, key)
            if name == "__metadata__":
                raise ConfigurationError(
                    f"{kind} {name!r} has a name that safetensors keeps for itself: give it another one"
                )
            if is_lazy(tensor):
                raise ConfigurationError(
                    f"{kind} {name!r} has no shape yet: run a batch through the model first"
                )


def _check(named: NamedTensor) -> None:
    tensor = named.tensor
    if tensor.dtype not in {torch.bfloat16, torch.float16, torch.float32, torch.float64}:
        raise ConfigurationError(
            f"parameter {named.name!r} has dtype {tensor.dtype}; only bfloat16, float16, float32 and float64 can be synced"
        )
    if type(tensor.detach()) is not torch.Tensor or tensor.layout is not torch.strided:
        raise ConfigurationError(
            f"parameter {named.name!r} is {kind_of(tensor.detach())} with layout {tensor.layout}; "
            "only plain dense tensors can be synced (no DTensor, no sparse tensors)"
        )
    if tensor.is_meta:
        raise ConfigurationError(
            f"parameter {named.name!r} is on the meta device: it has no values yet"
        )
    if tensor.is_inference():
        raise ConfigurationError(
            f"parameter {named.name!r} was made inside torch.inference_mode() and cannot be written to: make the model outside "
            "that mode"
        )


def _check_buffer(name: str, buffer: torch.Tensor) -> None:
    what = ""
    if buffer.is_complex():
        what = "complex"
    elif (
        buffer.layout is not torch.strided
        or buffer.is_meta
        or type(buffer.detach()) is not torch.Tensor
    ):
        what = f"{kind_of(buffer.detach())} with layout {buffer.layout} on device {buffer.device}"
    elif buffer.is_inference():
        what = "a tensor that was made inside torch.inference_mode() and cannot be written to"
    elif buffer.dtype not in SAFETENSORS_DTYPES:
        what = f"of dtype {buffer.dtype}, which safetensors does not know"
    if what:
        raise ConfigurationError(
            f"buffer {name!r} is {what}; only plain dense tensors of ordinary dtypes can be synced. "
            "Sync it yourself and pass buffers='none'."
        )


def _by_number(trainable: list[NamedTensor], count: int) -> list[list[NamedTensor]]:
    if count < 1:
        raise ConfigurationError(f"fragments must be at least 1, not {count}")
    if count > len(trainable):
        raise ConfigurationError(
            f"the model has {len(trainable)} trainable tensors, too few for {count} fragments"
        )
    total = sum(tensor.tensor.numel() for tensor in trainable)
    parts: list[list[NamedTensor]] = [[]]
    done = 0
    for index, tensor in enumerate(trainable):
        # Begin the next part when this one has its share, or when the tensors left are needed to fill the parts left.
        left = len(trainable) - index
        must = left == count - len(parts)
        full = parts[-1] and done + tensor.tensor.numel() / 2 > total * len(parts) / count
        if parts[-1] and len(parts) < count and (must or full):
            parts.append([])
        parts[-1].append(tensor)
        done += tensor.tensor.numel()
    return parts


def _by_module(
    model: torch.nn.Module, trainable: list[NamedTensor], modules: Sequence[torch.nn.Module]
) -> list[list[NamedTensor]]:
    if not modules:
        raise ConfigurationError("fragments must name at least one module")
    known = {id(tensor.tensor): tensor for tensor in trainable}
    inside = {id(module) for module in model.modules()}
    parts: list[list[NamedTensor]] = []
    for number, module in enumerate(modules):
        if not isinstance(module, torch.nn.Module) or id(module) not in inside:
            raise ConfigurationError(
                f"fragment {number} ({type(module).__name__}) is not a module of the model"
            )
        # pop(): a tensor tied into several fragments belongs to the first, and takes one outer step per cycle.
        part = [known.pop(id(p)) for p in module.parameters() if id(p) in known]
        if not part:
            raise ConfigurationError(
                f"fragment {number} ({type(module).__name__}) adds no trainable parameter"
            )
        parts.append(part)
    if known:
        names = ", ".join(repr(tensor.name) for tensor in known.values())
        raise ConfigurationError(f"these trainable parameters are in no fragment: {names}")
    return parts


def _buffers(model: torch.nn.Module, policy: Buffers) -> list[NamedTensor]:
    if policy is Buffers.NONE:
        return []
    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    buffers_by_id: dict[int, NamedTensor] = {}
    for key, buffer in named_buffers(model, persistent=True).items():
        if id(buffer) not in buffers_by_id:
            name = plain_name(model, key)
            if id(buffer) in parameters:
                raise ConfigurationError(
                    f"buffer {name!r} is the same tensor as parameter {parameters[id(buffer)]!r} and would be synced twice, "
                    "by different rules: register it only once"
                )
            _check_buffer(name, buffer)
            mean = policy is Buffers.MEAN and buffer.is_floating_point()
            buffers_by_id[id(buffer)] = NamedTensor(name, buffer, Rule.MEAN if mean else Rule.FIRST)
    return list(buffers_by_id.values())
