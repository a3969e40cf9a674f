"""The norms of a contribution's tensors in its file: the first section, which whoever updates a shard reads before the shard.

They are there once, and not in every shard's section: a tensor may be in several shards, and most shards hold parts of several
tensors. So a reader of one shard needs one more request, however many shards there are.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import xxhash

from .._errors import CorruptedObjectError
from .._store._api import ReadsAhead
from ._safetensors import LENGTH_BYTES
from ._sections import CHECKSUM_BYTES, NUMBER_BYTES, Section

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._store._api import ObjectReader


def norms_section(count: int, seed: int) -> Section:
    """The section of this many norms."""
    return Section("norms", (), seed, numbers=count)


def norms_part(section: Section, norms: Sequence[float]) -> bytes:
    """The bytes of the section."""
    data = struct.pack(f"<{section.numbers}d", *norms)
    return data + _checksum(section, data)


def announce_norms(reader: ObjectReader, section: Section, start: int) -> None:
    """Announce that the section, which begins at ``start``, will be read next, for stores that fetch ahead."""
    if isinstance(reader, ReadsAhead) and start >= LENGTH_BYTES:
        reader.expect(start, start + NUMBER_BYTES * section.numbers + CHECKSUM_BYTES)


def read_norms(
    reader: ObjectReader, section: Section, start: int, origin: str
) -> tuple[float, ...]:
    """The norms in the section that begins at ``start``. They are verified, since what they decide cannot be undone.

    Raises:
        CorruptedObjectError: They are damaged.
    """
    size = NUMBER_BYTES * section.numbers
    if start < LENGTH_BYTES:
        raise CorruptedObjectError(
            f"{origin} has only {reader.size} bytes: it is truncated, or it was written for another model"
        )
    data = bytearray(size + CHECKSUM_BYTES)
    reader.read_into(start, memoryview(data))
    norms = struct.unpack(f"<{section.numbers}d", data[:size])
    if data[size:] != _checksum(section, data[:size]) or not all(
        0 <= norm < math.inf for norm in norms
    ):
        raise CorruptedObjectError(
            f"{origin}, section norms: the checksum is wrong, or a norm is not a finite number of at least 0. The object is "
            "damaged, or it was written for another run, model or sync."
        )
    return norms


def _checksum(section: Section, data: bytes | bytearray) -> bytes:
    checksum = xxhash.xxh3_64_intdigest(data, seed=section.seed)
    return checksum.to_bytes(CHECKSUM_BYTES, "little")
