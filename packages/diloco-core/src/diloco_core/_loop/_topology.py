"""Refusing what makes several processes one replica: an outer loop over a store knows one process per replica."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from .._errors import ConfigurationError
from .._terms._support import support_of

if TYPE_CHECKING:
    from .._exchange._base import Exchange

# Module and class of each wrapper, and what it has once it talks to other processes. The classes are looked up and not imported:
# what nobody has imported, no model has.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "process_group"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "process_group"),
    ("torch.distributed.fsdp", "FSDPModule", "reshard"),
)
_WHY = "one process is one replica, and what several processes hold together is not supported yet"
_GROUP = "To train with the process group of all replicas instead of a store, pass ProcessGroupExchange()"


def check_topology(model: torch.nn.Module, exchange: Exchange) -> None:
    """Refuse a model that several processes hold together, and a process that is one of several.

    Over a process group or a manager, each process of a replica may have an exchange of its own.

    Raises:
        ConfigurationError: The message says what was found, and what to do.
    """
    for name, parameter in model.named_parameters():
        if _is(parameter, "torch.distributed.tensor", "DTensor"):
            raise ConfigurationError(
                f"parameter {name!r} is a DTensor, of which this process holds a part: {_WHY}. Give every replica a whole model "
                "in one process"
            )
    support = support_of(exchange)
    if support.lanes:
        return
    for name, module in model.named_modules():
        for place, wrapper, sign in _WRAPPERS:
            if _is(module, place, wrapper) and hasattr(module, sign):
                where = f"module {name!r} is" if name else "the model is"
                raise ConfigurationError(
                    f"{where} wrapped for several processes ({wrapper}): {_WHY}. Pass the plain model, as it was before it was "
                    f"wrapped, in one process for each replica. {_GROUP}"
                )
    group = torch.distributed
    if support.keeps_state and group.is_available() and group.is_initialized():
        size = group.get_world_size()
        if size > 1:
            raise ConfigurationError(
                f"this process is in a torch.distributed group of {size} processes, and the exchange meets over a store: "
                f"{_WHY}. If only one process of the group synced, the others would train on with other weights. Start each "
                f"replica as a process of its own, without init_process_group(). {_GROUP}"
            )


def _is(value: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)
