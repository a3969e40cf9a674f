"""What encoding and decoding cost, as ratios to a copy of the same values in the same run: ``hatch run bench-codecs``.

One thread works through 64 chunks of 1 MiB of fp32 values in turn, more than any cache holds, as an exchange does. Each figure
is the median over rounds in which all codecs take their turns, so that a noisy machine disturbs all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import torch

from diloco_core._arithmetic._layout import CHUNK_BYTES
from diloco_core._codecs._named import CODECS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CHUNKS = 64


def seconds(work: Callable[[int], object]) -> float:
    """Seconds for one chunk, as a mean over all chunks."""
    start = time.perf_counter()
    for number in range(CHUNKS):
        work(number)
    return (time.perf_counter() - start) / CHUNKS


def rounds_of(
    count: int, values: Sequence[torch.Tensor], out: Sequence[torch.Tensor]
) -> dict[str, list[tuple[float, float]]]:
    """For every codec, the times of encoding and decoding in each round, in copies of the values."""
    data = {name: [codec.encode(chunk) for chunk in values] for name, codec in CODECS.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CODECS}
    for _ in range(count):
        for name, codec in CODECS.items():
            copy = seconds(lambda number: out[number].copy_(values[number]))
            encode = seconds(lambda number, codec=codec: codec.encode(values[number]))
            decode = seconds(
                lambda number, codec=codec, data=data[name]: codec.decode(data[number], out[number])
            )
            found[name].append((encode / copy, decode / copy))
    return found


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds (default: 7)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    elements = CHUNK_BYTES // torch.float32.itemsize
    values = list(torch.randn(CHUNKS, elements, generator=torch.Generator().manual_seed(0)))
    out = list(torch.empty(CHUNKS, elements))
    rounds_of(1, values, out)
    print("one thread; times in copies of the fp32 values\n")
    print(f"{'codec':12} {'bytes a value':>13} {'encode':>7} {'decode':>7}")
    for name, times in rounds_of(arguments.rounds, values, out).items():
        encode, decode = (statistics.median(column) for column in zip(*times, strict=True))
        width = CODECS[name].size(torch.float32, elements) / elements
        print(f"{name:12} {width:13.3f} {encode:7.2f} {decode:7.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
