"""What a sync costs as replicas grow: ``hatch run bench-scale``.

The real exchanges, with the real outer loop above them and the real RemoteStore below, run in
virtual time over a model of S3. Printed is what a steady sync and the start cost: virtual seconds
until the last replica is through; requests by kind, serial round trips and bytes, per replica; US
dollars for all replicas. Beside it is what ``plan_exchange`` foresees.
"""

from __future__ import annotations

import argparse
import cProfile
import math
import pstats
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .cohort import KINDS, Run, simulate
from .figures import plan_of
from .page import write
from .s3 import S3
from .table import START, SYNC, conditions, line, markdown, start_cells, sync_cells

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cohort import Outcome

PAGE = Path(__file__).parents[3] / "packages/diloco-core/docs/scale.md"
"""Where the tables and the picture are kept."""

_WIDTHS = [8, 5, 5, 15, 13, 13, 13, 13, 4, 6, 15, 15, 17]


def main(given: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its tables."""
    arguments = _arguments(given)
    throttled = {"reads": 5500.0, "writes": 3500.0} if arguments.throttle else {}
    s3fs = {"bulk": 1, "head_reads": False} if arguments.driver == "s3fs" else {}
    s3 = S3(
        latency=arguments.latency,
        connection=arguments.connection,
        network=arguments.network,
        **throttled,
        **s3fs,
    )
    runs = [
        Run(
            kind,
            parameters,
            replicas,
            s3,
            warm=arguments.warm,
            # The gather topology publishes now and then: the mean of a whole round.
            measured=4 if kind == "gather" else 1,
            tensors=arguments.tensors,
            grace=arguments.grace,
            chunks=arguments.chunks,
        )
        for kind in arguments.kinds
        for parameters in arguments.parameters
        for replicas in arguments.replicas
    ]
    print(f"{conditions(s3)}\n\na steady sync\n")
    print(line(SYNC, _WIDTHS))
    done: list[tuple[Run, Outcome | None]] = [(run, None) for run in runs]
    for number, run in enumerate(runs):
        done[number] = run, _measured(run, arguments.most_requests, arguments.profile)
        if (
            arguments.write is not None
        ):  # each time, so that a run that is stopped leaves what it has counted
            write(arguments.write, s3, done)
    starts = markdown(
        START, [start_cells(run, outcome) for run, outcome in done if outcome is not None]
    )
    print(f"\nthe start\n\n{starts}")
    return 0


def _measured(run: Run, most_requests: float, profile: bool) -> Outcome | None:
    """Run it and print its line; None where it would take too long."""
    requests = run.replicas * (plan_of(run, round(run.parameters)).gets + 1)
    if requests > most_requests:
        print(
            line(sync_cells(run, None), _WIDTHS), f"(left out: {requests:.1g} requests for a sync)"
        )
        return None
    began, cpu = time.perf_counter(), time.process_time()
    profiles: list[cProfile.Profile] | None = [] if profile else None
    outcome = simulate(run, profiles)
    took = f"({time.perf_counter() - began:.0f} s, {time.process_time() - cpu:.0f} s of CPU)"
    print(line(sync_cells(run, outcome), _WIDTHS), took, flush=True)
    if profiles:
        stats = pstats.Stats(*profiles, stream=sys.stdout)
        stats.sort_stats("tottime").print_stats(25)
        stats.sort_stats("cumtime").print_stats("diloco_core", 40)
    return outcome


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    usual = S3()
    parser = argparse.ArgumentParser(
        prog="bench-scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=list(KINDS),
        help="kinds of runs (default: all)",
    )
    parser.add_argument(
        "--replicas", type=int, nargs="+", default=[4, 16, 64, 256], help="default: 4 16 64 256"
    )
    parser.add_argument(
        "--parameters",
        type=_count,
        nargs="+",
        default=[1e6, 1e8, 1e9],
        help="fp32, such as 125M (default: 1M 100M 1B)",
    )
    parser.add_argument(
        "--latency",
        type=float,
        default=usual.latency,
        help="seconds of a request (default: %(default)s)",
    )
    parser.add_argument(
        "--connection",
        type=float,
        default=usual.connection,
        help="bytes per second of a connection (default: %(default)g)",
    )
    parser.add_argument(
        "--network",
        type=float,
        default=usual.network,
        help="bytes per second of a replica (default: %(default)g)",
    )
    parser.add_argument(
        "--throttle",
        action="store_true",
        help="with S3's rates: 5,500 reads, 3,500 writes per second",
    )
    parser.add_argument(
        "--driver", choices=("obstore", "s3fs"), default="obstore", help="whose requests are sent"
    )
    parser.add_argument(
        "--warm", type=int, default=2, help="syncs before the measured one (default: %(default)s)"
    )
    parser.add_argument(
        "--tensors", type=int, default=24, help="tensors of the model (default: %(default)s)"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=60.0,
        help="of elastic runs, in seconds (default: %(default)g)",
    )
    parser.add_argument(
        "--chunks",
        type=int,
        default=1,
        help=(
            "how many chunks are handled as one: quicker here, and reads come in another order "
            "(default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--most-requests",
        type=float,
        default=math.inf,
        help="leave out runs whose syncs the planner gives more requests for all replicas together",
    )
    parser.add_argument(
        "--profile", action="store_true", help="print where the processor's time goes"
    )
    parser.add_argument(
        "--write",
        type=Path,
        nargs="?",
        const=PAGE,
        help=(
            "a file for the tables, in Markdown, and beside it one for the picture (default: the "
            "package's documentation)"
        ),
    )
    return parser.parse_args(given)


def _count(text: str) -> float:
    units = {"k": 1e3, "M": 1e6, "B": 1e9}
    value = float(text[:-1]) * units[text[-1]] if text[-1:] in units else float(text)
    if not 1e4 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of parameters from 10k on")
    return value
