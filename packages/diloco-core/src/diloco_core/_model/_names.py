"""Names of a model's tensors as they are without wrappers: a replica that compiles its model and one that does not agree."""

from __future__ import annotations

import sys

import torch

# A wrapper's class, as module and name, and under which name it holds the module that it wraps. Looked up and not imported:
# a wrapper whose module nobody has imported cannot be there, and importing torch.compile's takes a second.
_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
)


def plain_name(model: torch.nn.Module, name: str) -> str:
    """A tensor's name in the model without the wrappers around the model or parts of it.

    Only a wrapper's own part of the name goes: a module that somebody has called ``module`` keeps its name.

    Args:
        model: The model.
        name: The tensor's name in ``model.state_dict()``.
    """
    module: torch.nn.Module | None = model
    parts = []
    for part in name.split("."):
        if module is None or part != _wrapped(module):
            parts.append(part)
        inside = getattr(module, part, None)
        module = inside if isinstance(inside, torch.nn.Module) else None
    return ".".join(parts)


def _wrapped(module: torch.nn.Module) -> str | None:
    """Under which name a wrapper holds the module that it wraps; None where this is not a wrapper."""
    for where, kind, inner in _WRAPPERS:
        wrapper = getattr(sys.modules.get(where), kind, None)
        if isinstance(wrapper, type) and isinstance(module, wrapper):
            return inner
    return None
