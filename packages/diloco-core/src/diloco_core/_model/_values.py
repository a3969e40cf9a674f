"""Name the tensors of a model, and compare their values."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

import torch
import xxhash

from .._checks import kind_of
from .._wire._sections import view

_log = logging.getLogger("diloco_core")

# Number of elements that are hashed at once: other devices' tensors are copied in such pieces.
_HASHED_AT_ONCE = 2**22
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

    So it is the same whether or not a replica compiles its model. The wrappers may be around the
    model, or around parts of it.

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


def wrapped_in(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that a wrapper holds; None if ``module`` is no wrapper."""
    name = _wrapped(module)
    return None if name is None else module.get_submodule(name)


def _wrapped(module: torch.nn.Module) -> str | None:
    """Return the name under which a wrapper holds its module; None if ``module`` is no wrapper."""
    for module_name, class_name, attribute in _WRAPPERS:
        wrapper = getattr(sys.modules.get(module_name), class_name, None)
        if isinstance(wrapper, type) and isinstance(module, wrapper):
            return attribute
    return None


def describe(tensor: torch.Tensor) -> str:
    """The dtype and the shape of a tensor as text, such as ``float32[2, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def sample(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Return at most so many values of what is here of a tensor, evenly spread and flat."""
    flat = part_here(tensor.detach()).reshape(-1)
    return flat[:: max(1, -(-flat.numel() // most))]


def named_buffers(model: torch.nn.Module, *, persistent: bool) -> dict[str, torch.Tensor]:
    """The buffers that are saved with a model, or those that are not, under all of their names."""
    slots = buffer_slots(model, persistent=persistent)
    buffers = {
        path: module._buffers[name]  # noqa: SLF001
        for path, (module, name) in slots.items()
    }
    return {path: buffer for path, buffer in buffers.items() if buffer is not None}


def buffer_slots(
    model: torch.nn.Module, *, persistent: bool
) -> dict[str, tuple[torch.nn.Module, str]]:
    """Return where a model holds these buffers: the module and the attribute, by name.

    Buffers that are None are included.
    """
    return {
        f"{prefix}.{name}" if prefix else name: (module, name)
        for prefix, module in model.named_modules(remove_duplicate=False)
        # torch has no public way to ask which are persistent
        for name in module._buffers  # noqa: SLF001
        if (name not in module._non_persistent_buffers_set) == persistent  # noqa: SLF001
    }


def is_plain(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is dense and holds its own values.

    It is not if it is a DTensor, or quantised, sparse or on the meta device.
    """
    dense = type(tensor.detach()) is torch.Tensor and tensor.layout is torch.strided
    return dense and not tensor.is_quantized and not tensor.is_meta


def part_here(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor: all of it, or its part of a DTensor."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor as bytes.

    Inner state holds only tensors of some dtypes, and a buffer may have any.
    """
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def compared_tensors(
    model: torch.nn.Module, frozen: Mapping[str, torch.Tensor]
) -> tuple[dict[str, str], dict[int, str | None]]:
    """Describe the tensors that are never synced but must be equal at all replicas.

    These are frozen parameters, and buffers that are not saved. Their values are read once; only
    small pieces are copied.

    Args:
        model: The model.
        frozen: The parameters that are not synced, by name.

    Returns:
        The description of each tensor, with a checksum of its values, by its name; and the
        checksums by the ``id`` of the tensor, None if its values cannot be read.
    """
    synced = {id(tensor) for tensor in named_buffers(model, persistent=True).values()}
    lines: dict[str, str] = {}
    sums: dict[int, str | None] = {}
    buffers = named_buffers(model, persistent=False)
    for kind, tensors in (("frozen", frozen), ("not persistent", buffers)):
        for name, tensor in tensors.items():
            if id(tensor) in synced:
                continue
            if id(tensor) not in sums:
                sums[id(tensor)] = checksum(tensor)
            values = sums[id(tensor)]
            if values is None:
                _log.warning(
                    (
                        "the values of %r, %s, cannot be compared between the replicas: make sure "
                        "that they are the same everywhere"
                    ),
                    name,
                    kind_of(tensor),
                )
            held = f" with values {values}" if values else ""
            lines[plain_name(model, name)] = f"{describe(tensor)} {kind}{held}"
    return lines, sums


def checksum(tensor: torch.Tensor) -> str | None:
    """Return the xxh3-64 of a tensor's values in row-major order.

    None for kinds of tensors whose values cannot be read this way.
    """
    digest = xxhash.xxh3_64()
    return digest.hexdigest() if _feed(digest, tensor.detach()) else None


def _feed(digest: xxhash.xxh3_64, tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__"):
        # It consists of several tensors, as quantized weights do.
        names, _ = tensor.__tensor_flatten__()
        # A list, so that all of them are fed.
        return all([_feed(digest, getattr(tensor, name).detach()) for name in names])  # noqa: C419
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    try:
        flat = tensor.reshape(-1)
        if tensor.is_complex():
            flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
        for start in range(0, flat.numel(), _HASHED_AT_ONCE):
            piece = flat[start : start + _HASHED_AT_ONCE].contiguous().cpu()
            digest.update(view(piece.view(torch.uint8)))
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True
