"""The file of an inner state: safetensors, with the states in its metadata.

A checksum covers every other byte.
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

from .._errors import ConfigurationError, CorruptedObjectError, FormatError
from .._store._api import Buffer
from .._wire._safetensors import LENGTH_BYTES, MOST_HEADER_BYTES, entry, header_bytes, parse_header
from .._wire._sealed import FORMAT
from .._wire._sections import view

_CHECKSUM_BYTES = 8
_CHECKSUM = "xxh3"


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
        tree: The states, as :func:`._packed.pack` returns them, and further fields.
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
    entries[_CHECKSUM] = entry(torch.uint8, [8], offset, offset + _CHECKSUM_BYTES)
    beginning = header_bytes(entries, metadata)
    check_size("the inner optimizer together with stateful=", len(beginning))
    checksum = xxhash.xxh3_64(beginning, seed=_seed(identity))
    yield beginning
    for tensor in tensors:
        data = view(tensor.contiguous().cpu())
        checksum.update(data)
        yield data
    yield checksum.intdigest().to_bytes(_CHECKSUM_BYTES, "little")


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
    body, ending = memoryview(data)[:-_CHECKSUM_BYTES], memoryview(data)[-_CHECKSUM_BYTES:]
    stored = int.from_bytes(ending, "little")
    if (
        len(data) < LENGTH_BYTES + _CHECKSUM_BYTES
        or xxhash.xxh3_64_intdigest(body, seed=_seed(identity)) != stored
    ):
        raise CorruptedObjectError(
            f"{origin}: the checksum is wrong. The saved inner state is damaged, or it was written "
            "under another key or in another run."
        )


def _seed(identity: str) -> int:
    return xxhash.xxh3_64_intdigest(identity.encode())


def verified(
    data: bytes, identity: str, origin: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The states in a file, in the form of :func:`._packed.pack`, and its tensors by number.

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
    """The states in a file, in the form of :func:`._packed.pack`.

    All bytes are verified before anything is parsed.
    """
    check_inner(data, identity, origin)
    body = memoryview(data)[:-_CHECKSUM_BYTES]
    try:
        metadata = parse_header(body)["__metadata__"]
        file_format = metadata.get("format", "of an earlier version")
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
