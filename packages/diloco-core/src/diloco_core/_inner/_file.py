"""Write and read the file of an inner state: safetensors, with the states in its metadata.

They are there as JSON can hold them, without pickle, with their tensors beside them. A checksum
covers every other byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from .._checks import kind_of
from .._errors import ConfigurationError, CorruptedObjectError, FormatError
from .._model._values import is_plain
from .._store._api import Buffer
from .._wire._safetensors import LENGTH_BYTES, MOST_HEADER_BYTES, entry, header_bytes, parse_header
from .._wire._sealed import FORMAT
from .._wire._sections import CHECKSUM_BYTES, sum_bytes, view

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


@dataclass(frozen=True, slots=True)
class SavedInner:
    """An inner state in the store.

    Attributes:
        sync: The sync in the run's log after which it was saved.
        identity: The run and the key that it belongs to.
        origin: What it is called in errors.
        data: The bytes of the file, which are not verified yet.
    """

    sync: int
    identity: str
    origin: str
    data: bytes = field(repr=False)

    def rollback(self) -> int:
        """Number of the newest rollback that was in the log when the state was saved.

        Raises:
            CorruptedObjectError: The file is damaged.
            FormatError: Another version of diloco-core has written the file.
        """
        return int(_description(self.data, self.identity, self.origin)["rollback"])


def file_parts(
    tree: Mapping[str, Any], tensors: Sequence[torch.Tensor], identity: str
) -> Iterator[Buffer]:
    """The bytes of a file. One tensor at a time is copied to the CPU.

    Args:
        tree: The states, as :func:`pack` returns them, and further fields.
        tensors: Their tensors.
        identity: The run and the key that the file will belong to.

    Raises:
        ConfigurationError: The states take too much room besides their tensors.
    """
    metadata = {"diloco": "inner", "format": str(FORMAT), "tree": json.dumps(tree)}
    entries: dict[str, object] = {}
    offset = 0
    for number, tensor in enumerate(tensors):
        end = offset + tensor.numel() * tensor.itemsize
        entries[str(number)] = entry(tensor.dtype, tensor.shape, offset, end)
        offset = end
    entries["xxh3"] = entry(torch.uint8, [CHECKSUM_BYTES], offset, offset + CHECKSUM_BYTES)
    beginning = header_bytes(entries, metadata)
    check_size("the inner optimizer together with stateful=", len(beginning))
    checksum = xxhash.xxh3_64(beginning, seed=_seed(identity))
    yield beginning
    for tensor in tensors:
        data = view(tensor.contiguous().cpu())
        checksum.update(data)
        yield data
    yield sum_bytes(checksum.intdigest())


def check_size(name: str, size: int, share: float = 1.0) -> None:
    """Refuse states that take more than a share of the room that a file has besides its tensors.

    Raises:
        ConfigurationError: They do.
    """
    if size > share * MOST_HEADER_BYTES:
        raise ConfigurationError(
            f"the state of {name} takes {size} bytes besides its tensors, which is too much: a "
            f"file that can be read again has at most {MOST_HEADER_BYTES} bytes of this. Let "
            "state_dict() return long lists of numbers as tensors."
        )


def check_inner(data: bytes, identity: str, origin: str) -> None:
    """Verify the checksum of a file.

    It covers all other bytes of the file, and its seed is made from the run and the key.

    Raises:
        CorruptedObjectError: The file is damaged.
    """
    body, ending = memoryview(data)[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    checksum = xxhash.xxh3_64_intdigest(body, seed=_seed(identity))
    if len(data) < LENGTH_BYTES + CHECKSUM_BYTES or ending != sum_bytes(checksum):
        raise CorruptedObjectError(
            f"{origin}: the checksum is wrong. The saved inner state is damaged, or it was written "
            "under another key or in another run."
        )


def _seed(identity: str) -> int:
    return xxhash.xxh3_64_intdigest(identity.encode())


def verified(
    data: bytes, identity: str, origin: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The states in a file, in the form of :func:`pack`, and its tensors by number.

    Raises:
        CorruptedObjectError: The file is damaged.
        FormatError: Another version of diloco-core has written the file.
    """
    tree = _description(data, identity, origin)
    try:
        return tree, load_tensors(data)
    except SafetensorError as error:
        raise CorruptedObjectError(
            f"{origin} is not the inner state of a replica: {error}"
        ) from error


def _description(data: bytes, identity: str, origin: str) -> dict[str, Any]:
    """The states in a file, in the form of :func:`pack`.

    All bytes are verified before anything is parsed.
    """
    check_inner(data, identity, origin)
    try:
        metadata = parse_header(memoryview(data)[:-CHECKSUM_BYTES])["__metadata__"]
        file_format = metadata["format"]
        if file_format != str(FORMAT):
            raise FormatError(
                f"{origin} has format {file_format!s:.60}, and this version of diloco-core reads "
                f"format {FORMAT} only: use the version that the run was begun with"
            )
        tree: dict[str, Any] = json.loads(metadata["tree"])
        if (
            not isinstance(tree["kinds"], dict)
            or not isinstance(tree["parameters"], dict)
            or not all(isinstance(tree[name], int) for name in ("inner_steps", "rollback"))
            or "random" not in tree
        ):
            raise TypeError("its metadata are incomplete")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptedObjectError(
            f"{origin} is not the inner state of a replica: {error}"
        ) from error
    return tree


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
            kind: [
                # The states of random generators have more than a thousand small integers.
                item
                if type(item) is int and item.bit_length() <= _DECIMAL_BITS
                else pack(item, tensors, f"{where}[{number}]")
                for number, item in enumerate(value)
            ]
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
