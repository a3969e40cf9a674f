"""The index lists of a Job's status: ``0,2-4``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

MOST = 10_000_000  # far more than any Job has


def text(indexes: Iterable[int]) -> str:
    """Return the sorted list, with three or more neighbours as a range: two stay ``1,2``."""
    ordered = sorted(set(indexes))
    if not ordered:
        return ""
    cuts = [
        0,
        *(place for place, (low, high) in enumerate(pairwise(ordered), 1) if high != low + 1),
        len(ordered),
    ]
    parts = []
    for start, end in pairwise(cuts):
        run = ordered[start:end]
        parts.append(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)))
    return ",".join(parts)


def parse(listed: str) -> set[int]:
    """Return the indexes of a list that ``text`` wrote.

    Raises:
        ValueError: it is not such a list.
    """
    indexes: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)) or len(first + last) > 20:
            raise ValueError(f"{part!r} is neither an index nor a range of indexes")
        if int(last or first) > MOST:
            raise ValueError(f"{last or first} is above {MOST}")
        indexes.update(range(int(first), int(last or first) + 1))
    return indexes
