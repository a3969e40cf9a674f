"""The names of a model's tensors without its wrappers.

So they are the same whether or not a replica compiles its model.
"""

from __future__ import annotations

import sys

import torch

# The class of a wrapper, as module and name, and the name under which it holds the module that it
# wraps. The class is looked up and not imported: if nothing has imported its module, there is no
# such wrapper, and to import torch.compile's takes a second.
_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)


def plain_name(model: torch.nn.Module, name: str) -> str:
    """Return the name of a tensor without the names that wrappers add.

    The wrappers may be around the model, or around parts of it.

    Only the part of a wrapper is taken out: a module that the user calls ``module`` keeps its name.

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
    """Return the name under which a wrapper holds its module; None if ``module`` is no wrapper."""
    for module_name, class_name, attribute in _WRAPPERS:
        wrapper = getattr(sys.modules.get(module_name), class_name, None)
        if isinstance(wrapper, type) and isinstance(module, wrapper):
            return attribute
    return None
