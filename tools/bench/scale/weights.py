"""How many bytes an object stands for: payloads are scaled down, headers and checksums are not.

A payload object is a safetensors file. Its tensors whose names end in ``.xxh3`` are checksums (with
the zeros before them); all others are values, every byte of which stands for ``factor`` bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

from diloco_core._wire._safetensors import header_size, parse_header

_PAYLOADS = ("deltas/", "state/", "initial/", "unsynced/")


class Weighed:
    """An object, and what each of its bytes stands for.

    Attributes:
        data: Its bytes, as they are in memory.
        values: Where its values begin.
    """

    __slots__ = ("_before", "_factor", "_starts", "data", "values")

    def __init__(self, key: str, data: bytes, factor: int) -> None:
        self.data = data
        self.values = len(data)
        self._factor = factor
        self._starts: tuple[int, ...] = ()
        self._before: tuple[int, ...] = ()
        if factor > 1 and key.startswith(_PAYLOADS) and key.endswith(".safetensors"):
            self.values = header_size(data)
            self._starts, self._before = _stretches(data[: self.values], len(data))

    @property
    def weight(self) -> int:
        """How many bytes all of it stands for."""
        return self.between(0, len(self.data))

    def between(self, start: int, stop: int) -> int:
        """How many bytes those from ``start`` to ``stop`` stand for."""
        return (
            stop
            - start
            + (self._factor - 1) * (self._values_before(stop) - self._values_before(start))
        )

    def reaching(self, weight: int) -> int:
        """Where the first bytes end that stand for so many."""
        if not self._starts or weight <= self.values:
            return min(weight, len(self.data))
        # Headers are far smaller than what is asked for here; checksums among the values are passed
        # over.
        return min(self.values + (weight - self.values) // self._factor // 4 * 4, len(self.data))

    def _values_before(self, offset: int) -> int:
        """How many of the bytes before an offset are values."""
        index = bisect_right(self._starts, offset) - 1
        if index < 0:
            return 0
        # Stretches of values and of checksums alternate, beginning with values.
        before = self._before[index]
        return before if index % 2 else before + offset - self._starts[index]


@lru_cache(maxsize=64)
def _stretches(header: bytes, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where values and checksums begin in turn, and how many values lie before each place."""
    tensors = parse_header(header)
    checksums = sorted(
        tuple(entry["data_offsets"]) for name, entry in tensors.items() if name.endswith(".xxh3")
    )
    starts, before, here, values = [], [], len(header), 0
    for start, stop in checksums:
        starts += [here, len(header) + start]
        before += [values, values + len(header) + start - here]
        values = before[-1]
        here = len(header) + stop
    if here < size:
        starts.append(here)
        before.append(values)
    return tuple(starts), tuple(before)
