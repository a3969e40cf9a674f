"""Checking the tables of a manifest, which say where each tensor is in the files of a run.

Until then, no number in them is taken for a size.
"""

from __future__ import annotations

import math
from typing import Any

from .._arithmetic._layout import Rule
from ._fields import LARGEST, Fields
from ._safetensors import SAFETENSORS_DTYPES

MOST_SHARDS = 10**5
"""Shards have five digits in keys."""

DTYPES = {str(dtype): dtype for dtype in SAFETENSORS_DTYPES}
"""The dtypes by the names that they have in manifests."""

_RULES = "|".join(Rule)
_CHECKSUM = "[0-9a-f]{16}"


def check_fragments(fields: Fields) -> None:
    """Check the tables of a manifest's fragments, and what is not synced.

    Raises:
        CorruptedObjectError: A table is not one that a run writes. The message names the field.
    """
    for table in fields.parts("fragments"):
        table.text("name")
        table.text("fingerprint", "[0-9a-f]{32}")
        table.whole("shards", 1, MOST_SHARDS)
        _check_table(table)
    unsynced = fields.part("unsynced")
    if unsynced.names():
        _check_unsynced(unsynced)
    settings = fields.texts_by_name("settings")
    for name, least in (("committed", "0"), ("full_state_every", "1")):
        if name in settings:
            fields.part("settings").text(name, rf"[{least}-9][0-9]{{0,17}}")


def _check_unsynced(table: Fields) -> None:
    table.text("folder", "unsynced/[0-9a-f]{16}")
    sums = table.texts("sums", _CHECKSUM)
    if table.whole("shards", 0, MOST_SHARDS) != len(sums):
        raise table.wrong("it does not have one checksum for every shard")
    _check_table(table)
    table.texts_by_name("aliases")
    table.texts("omitted")
    if "special" in table.names():
        table.texts_by_name("special")


def _check_table(table: Fields) -> None:
    """Check groups and tensors: the tensors of a group have to fill it, one after another."""
    ends: list[int] = []
    itemsizes: list[int] = []
    for group in table.parts("groups"):
        dtype = DTYPES.get(group.text("dtype"))
        if dtype is None:
            raise group.wrong("this version of torch does not know its dtype")
        itemsizes.append(dtype.itemsize)
        ends.append(group.whole("numel", 0, LARGEST // 16))
        group.text("rule", _RULES)
    if itemsizes != sorted(itemsizes, reverse=True):
        raise table.wrong("its groups are not in order of their dtypes, the widest first")
    if "block" in table.names():
        table.whole("block", 1, 2**31)
    filled = [0] * len(ends)
    names = set()
    for entry in table.items("tensors"):
        if not _is_tensor(entry, filled):
            raise table.wrong(
                f"the entry of a tensor is wrong, or not in its place: {entry!r:.200}"
            )
        filled[entry["group"]] += math.prod(entry["shape"])
        names.add(entry["name"])
    if filled != ends or len(names) != len(table.items("tensors")):
        raise table.wrong("its tensors do not fill its groups, or have names in common")


def _is_tensor(entry: Any, filled: list[int]) -> bool:
    """Say whether an entry is a tensor that begins where the one before it in its group ended.

    Written for speed: a manifest may have hundreds of thousands of entries.
    """
    if not isinstance(entry, dict):
        return False
    name, group, start = entry.get("name"), entry.get("group"), entry.get("start")
    shape, dtype = entry.get("shape"), entry.get("dtype")
    return (
        type(name) is str
        and type(group) is int
        and 0 <= group < len(filled)
        and type(start) is int
        and start == filled[group]
        and isinstance(shape, list)
        and all(type(size) is int and 0 <= size <= LARGEST for size in shape)
        and len(shape) <= 64
        and type(dtype) is str
        and dtype in DTYPES
    )
