"""The cost of encoding and decoding, as ratios to a copy in one run: ``hatch run bench-codecs``.

One thread works through 64 chunks of 1 MiB of fp32 values in turn, more than any cache holds, as an
exchange does. In each round each codec takes its turn, and before it a copy of the same chunks. Of
each chunk, the least processor time of all rounds counts, since what else a machine does only adds
to it. Each figure is the median of the chunks, divided by that of the copies before the codec,
which are as many measurements.
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
    from collections.abc import Callable, Mapping, Sequence

    from diloco_core import Codec

CHUNKS = 64
# What encoding and decoding may take.
GOALS = {"int8": (3, 2), "e2m1": (6, 3)}
SPARSE_GOAL = 5.0  # to encode


def times(work: Callable[[int], object]) -> list[int]:
    """Nanoseconds of processor time for each chunk."""
    found = []
    for number in range(CHUNKS):
        start = time.thread_time_ns()
        work(number)
        found.append(time.thread_time_ns() - start)
    return found


def typical(rounds: Sequence[Sequence[int]]) -> float:
    """The least time of each chunk in all rounds, and the median of these."""
    return statistics.median(map(min, zip(*rounds, strict=True)))


def rounds_of(
    count: int,
    codecs: Mapping[str, Codec],
    values: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
) -> dict[str, tuple[float, float]]:
    """For every codec, the times of encoding and decoding, in copies of the values."""
    data = {name: [codec.encode(chunk) for chunk in values] for name, codec in codecs.items()}
    found: dict[str, list[tuple[list[int], list[int], list[int]]]] = {name: [] for name in codecs}
    for _ in range(count):
        for name, codec in codecs.items():
            turn = (
                times(lambda number: out[number].copy_(values[number])),
                times(lambda number, codec=codec: codec.encode(values[number])),
                times(
                    lambda number, codec=codec, data=data[name]: codec.decode(
                        data[number], out[number]
                    )
                ),
            )
            found[name].append(turn)
    ratios = {}
    for name, turns in found.items():
        copy, encode, decode = map(typical, zip(*turns, strict=True))
        ratios[name] = encode / copy, decode / copy
    return ratios


def goals(name: str) -> str:
    """What the times of a codec should be, as text; empty if nothing was said of it."""
    if name.startswith("topk"):
        return f"<= {SPARSE_GOAL:g}"
    return ", ".join(f"<= {each}" for each in GOALS.get(name, ()))


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
    rounds_of(1, CODECS, values, out)
    print("one thread; times in copies of the fp32 values\n")
    print(f"{'codec':14} {'bytes a value':>13} {'encode':>7} {'decode':>7}   goals")
    for name, (encode, decode) in rounds_of(arguments.rounds, CODECS, values, out).items():
        width = CODECS[name].size(torch.float32, elements) / elements
        print(f"{name:14} {width:13.3f} {encode:7.2f} {decode:7.2f}   {goals(name)}".rstrip())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
