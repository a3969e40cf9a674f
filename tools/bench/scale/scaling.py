"""Make everything smaller by a factor, so that hundreds of large models fit into memory.

A model of 10^9 parameters is simulated with 10^9 / factor of them. Then every constant that cuts
values into blocks, parts, shards or chunks has to be smaller by the same factor, so that as many
requests come out as with the large model.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import diloco_core
from diloco_core._arithmetic._layout import shards_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

CUTTING = {
    "BLOCK_BYTES",
    "HEAD_BYTES",
    "PART_BYTES",
    "SHARD_BYTES",
    "BUDGET_BYTES",
    "_LEAST_BLOCK_BYTES",
}
"""Constants that say how values are cut, in bytes."""
OTHERS = {
    "_BLOCK",  # values that a sparse codec encodes together
    "_KEPT_BYTES",
    "CHUNK_BYTES",  # given to the exchanges
    "SUMMED_BYTES",  # as large as those
    "HISTORY_BYTES",  # of telemetry, as the next
    "LINE_BYTES",
    "LARGE_BYTES",
    "OBJECT_BYTES",
    "RECORD_BYTES",
    "_FAIR_BYTES",
    "_FIRST_BYTES",
    "MOST_HEADER_BYTES",
    "_MOST_READ_BYTES",
    "_PART_OF_RANGE",
}
"""Constants that count bytes of something else, or are not used here."""
_ELSEWHERE = {
    "diloco_core._connect",
    "diloco_core._exchange._process_group",
    "diloco_core._export._export",
    "diloco_core._inner._file",
    "diloco_core._processes._inside",
    "diloco_core._torchft._manager",
    "diloco_core.transformers",  # needs what is not installed here
}
"""Modules that have no part in what is simulated."""
_SIZE = re.compile(r"_?[A-Z_]*(BYTES|BLOCK|BUDGET|SIZE|RANGE|MEMORY)[A-Z_]*")
_SMALL = 4096

_ALIGNMENT = 16  # of shards, in elements
_LARGEST_FACTOR = 4096  # so that the smallest block is larger than a few checksums
_ELEMENTS = 640  # of a shard, at least: then rounding changes its size by less than 3 %
_MEMORY = 6e9  # bytes for all replicas together
# How often a replica holds the model: parameters, gradient, global copy, contribution, published
# shards
_COPIES = 5


@dataclass(frozen=True, slots=True)
class Scale:
    """How a model is made smaller.

    Attributes:
        factor: By how much.
        elements: What is left of its parameters.
    """

    factor: int
    elements: int

    @property
    def parameters(self) -> int:
        """How many parameters are simulated: as many as were asked for but for rounding."""
        return self.factor * self.elements

    @classmethod
    def fitting(cls, parameters: float, replicas: int) -> Scale:
        """The one for a model of so many fp32 parameters and so many replicas."""
        shards = shards_of(math.ceil(4 * parameters), replicas)
        least = min(_ELEMENTS * shards, _MEMORY / (4 * _COPIES * replicas))
        factor = 1
        while factor < _LARGEST_FACTOR and parameters / (2 * factor) >= least:
            factor *= 2
        unit = _ALIGNMENT * shards
        return cls(factor, unit * max(1, round(parameters / factor / unit)))


@contextmanager
def scaled(factor: int) -> Iterator[dict[str, int]]:
    """Divide the constants of ``diloco_core`` that cut values; gives them as they were.

    Raises:
        RuntimeError: There is a constant in bytes of which it is not said here whether it is one of
            those.
    """
    names = {
        module.name for module in pkgutil.walk_packages(diloco_core.__path__, "diloco_core.")
    } - _ELSEWHERE
    modules = [importlib.import_module(name) for name in sorted(names)]
    found = [(module, name, value) for module in modules for name, value in _sizes(module)]
    unknown = {
        f"{module.__name__}.{name}" for module, name, _ in found if name not in CUTTING | OTHERS
    }
    if unknown:
        raise RuntimeError(
            f"say in {__file__} whether these constants cut values: {', '.join(sorted(unknown))}"
        )
    cutting = [(module, name, value) for module, name, value in found if name in CUTTING]
    try:
        for module, name, value in cutting:
            setattr(module, name, value // factor)
        yield {name: value for _, name, value in cutting}
    finally:
        for module, name, value in cutting:
            setattr(module, name, value)


def _sizes(module: ModuleType) -> list[tuple[str, int]]:
    return [
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, int)
        and not isinstance(value, bool)
        and value >= _SMALL
        and _SIZE.fullmatch(name)
    ]
