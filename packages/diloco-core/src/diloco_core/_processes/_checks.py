"""Mistakes that only show where several processes are one replica, named on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .._checks import kind_of
from .._errors import ConfigurationError, ModelChangedError
from .._model._values import describe, is_plain, plain_name
from .._seconds import Seconds
from ._inside import Inside
from ._twin import named_tensors


def refuse_together(
    inside: Inside,
    model: torch.nn.Module,
    options: Mapping[str, Any],
    prepare: Callable[[], object],
) -> None:
    """Refuse on every process what is wrong on one of them.

    Args:
        inside: The processes.
        model: The model.
        options: What all of them must have in common.
        prepare: Raises a :class:`.ConfigurationError` if something is wrong on this process.

    Raises:
        ConfigurationError: The message names the process.
    """
    lines: list[str] = []
    try:
        prepare()
        lines = _lines(model, options)
        problem = _problem(inside, model)
    except ConfigurationError as error:
        problem = str(error)
    told = inside.collect((problem, lines))
    for process, (problem, _) in enumerate(told):
        if problem:
            raise ConfigurationError(f"process {process} of this replica: {problem}")
    first = told[0][1]
    for process, (_, theirs) in enumerate(told):
        if theirs == first:
            continue
        differing = [
            f"process {number}: {line}"
            for number, lines, others in ((process, theirs, first), (0, first, theirs))
            for line in lines
            if line not in others
        ]
        raise ConfigurationError(
            "the processes of this replica do not have the same model and settings: "
            f"{', '.join(differing[:4]) or 'another order of the tensors'}. Make them alike: each "
            "process has the whole model, or a part of every tensor (no pipeline parallel)"
        )


def refuse_open_gradients(model: torch.nn.Module) -> None:
    """Refuse gradients that FSDP2 has accumulated and not reduced, before a sync.

    Raises:
        ModelChangedError: There are some.
    """
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and _has_open_gradients(module):
            raise ModelChangedError(
                f"module {name!r} holds gradients that FSDP2 has accumulated and not reduced "
                "(set_requires_gradient_sync(False)) at a sync, which would add them to the "
                "next step. Reduce them in the last backward pass before each step()",
                name,
            )


def _has_open_gradients(module: FSDPModule) -> bool:
    # torch has no public name for this, and what it is called may change: then nothing is seen.
    group = getattr(module._get_fsdp_state(), "_fsdp_param_group", None)  # noqa: SLF001
    return any(
        getattr(parameter, "unsharded_accumulated_grad", None) is not None
        or getattr(getattr(parameter, "_unsharded_param", None), "grad", None) is not None
        for parameter in getattr(group, "fsdp_params", ())
    )


def _lines(model: torch.nn.Module, options: Mapping[str, Any]) -> list[str]:
    """Describe what all processes must have in common, a line for each."""
    tensors = [
        f"{plain_name(model, name)} {describe(tensor)}{' trained' if tensor.requires_grad else ''}"
        for name, tensor in named_tensors(model)
    ]
    settings = [
        f"{name}={repr(value) if _is_plain(value) else kind_of(value)}"
        for name, value in sorted(options.items())
    ]
    return [*settings, *tensors]


def _is_plain(value: Any) -> bool:
    """Say whether a value is written alike in every process."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str, Seconds, type(None)))


def _problem(inside: Inside, model: torch.nn.Module) -> str:
    """Return why these processes cannot hold a model together; empty if they can."""
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if type(module).__name__ == "FullyShardedDataParallel":
            return f"{where} is wrapped by FullyShardedDataParallel (FSDP1). Use fully_shard or DDP"
        if isinstance(module, DistributedDataParallel):
            ranks = torch.distributed.get_process_group_ranks(module.process_group)
            if set(ranks) != set(inside.ranks):
                return (
                    f"{where} is in a DistributedDataParallel of processes {ranks}, and this "
                    f"replica is {inside.ranks}: give it a process_group of exactly these"
                )
    for key, tensor in named_tensors(model):
        name, values = plain_name(model, key), tensor.detach()
        if isinstance(values, DTensor):
            if not set(values.device_mesh.mesh.flatten().tolist()) <= set(inside.ranks):
                return f"{name!r} is on processes outside this replica: mesh it over {inside.ranks}"
            values = values.to_local()
        if values.is_meta:
            return f"{name!r} is on the meta device and has no values yet: load the values first"
        if not is_plain(values):
            found = f"{kind_of(values)} of {values.dtype} ({values.layout})"
            return f"{name!r} is {found}, and only plain dense tensors are synced: convert it first"
    return ""
