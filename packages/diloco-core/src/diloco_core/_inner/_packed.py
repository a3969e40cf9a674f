"""States as JSON can hold them, with their tensors beside them, to be saved without pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._checks import kind_of
from .._errors import ConfigurationError
from .._model._values import is_plain

# Integers with more bits are written as hexadecimal text, since Python refuses to read and write
# thousands of decimal digits.
_DECIMAL_BITS = 1024
_WAY_OUT = (
    " With save_inner_every=0 the inner state is not saved, and a rank that comes back begins "
    "with a new one."
)
_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)


def pack(value: Any, tensors: list[torch.Tensor], where: str) -> Any:
    """A value in a form that JSON can hold.

    Tensors are appended to a list, and take the form of their number in it.
    """
    if isinstance(value, int) and value.bit_length() > _DECIMAL_BITS:
        return {"int": hex(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        if value.dtype not in _DTYPES:
            known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in _DTYPES))
            raise ConfigurationError(
                f"{where} is a tensor of {value.dtype}, which cannot be saved. These dtypes can: "
                f"{known}." + _WAY_OUT
            )
        if not is_plain(value):
            raise ConfigurationError(
                f"{where} is {kind_of(value.detach())} ({value.layout}, on {value.device}), which "
                "cannot be saved: only plain, dense tensors can." + _WAY_OUT
            )
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {
            kind: [pack(item, tensors, f"{where}[{number}]") for number, item in enumerate(value)]
        }
    if isinstance(value, dict):
        return {
            "dict": [
                [pack(k, tensors, where), pack(v, tensors, _entry(where, k))]
                for k, v in value.items()
            ]
        }
    raise ConfigurationError(
        f"{where} is {kind_of(value)}, which cannot be saved: only numbers, text, lists, tuples, "
        "dicts and tensors can." + _WAY_OUT
    )


def _entry(where: str, key: object) -> str:
    # Python refuses to print an integer with thousands of decimal digits.
    if isinstance(key, int) and key.bit_length() > _DECIMAL_BITS:
        return f"{where}[{hex(key)}]"
    return f"{where}[{key!r}]"


def unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value of which :func:`pack` has made this; ``tensors`` are named by their numbers."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[str(content)]
    if kind == "int":
        return int(content, 16)
    if kind == "dict":
        return {unpack(key, tensors): unpack(item, tensors) for key, item in content}
    items = [unpack(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
