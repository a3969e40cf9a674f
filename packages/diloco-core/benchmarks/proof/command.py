"""The proof: what overlap and codecs gain, and what they cost: ``hatch run bench-proof``.

A small language model over bytes learns the text of Python's standard library, with four replicas,
in every way that rows.py lists. Measured are the loss in the end with three seeds; and, with
processes on a slow link each, the share of the time that goes into training, and bytes. Then the
table in docs/measured.md and the picture beside it are written.

Results are kept, so that a second call measures only what is missing; --again measures once more.
"plans" puts what the planner says today beside the times that are kept.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from .goals import goals
from .losses import Training, loss_of, parameters_of
from .page import PAGE, write
from .results import FOLDER, Results
from .rows import LINKS, ROWS
from .text import standard_library
from .timing import planned, time_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .rows import Row
    from .timing import Time

SEEDS = (0, 1, 2)


def main(given: Sequence[str] | None = None) -> int:
    """Measure what is missing, and write the table and the picture."""
    arguments = _arguments(given)
    what = arguments.what or ["losses", "times", "plans", "page"]
    rows = [row for row in ROWS if arguments.rows is None or row.name in arguments.rows]
    folder = arguments.results
    links = arguments.links or list(LINKS)
    if arguments.again:
        forget(folder, what, rows, links)
    if "losses" in what:
        measure_losses(rows, folder)
    if "times" in what:
        measure_times(rows, folder, links, arguments.times)
    if "plans" in what:
        plan_again(folder)
    if "page" in what:
        write(arguments.page, folder)
        print(arguments.page)
    for goal in goals(Results.of(folder / "losses.json"), Results.of(folder / "times.json")):
        print("met:   " if goal.met else "MISSED:", goal.text)
    return 0


def forget(folder: Path, what: Sequence[str], rows: Sequence[Row], links: Sequence[str]) -> None:
    """Forget the results of these rows, and of times those over these links.

    A file of which nothing is left goes, too.
    """
    for name, keys in (("losses", None), ("times", links)):
        if name in what:
            results = Results.of(folder / f"{name}.json")
            for row in rows:
                results.forget(row.name, keys)


def measure_losses(
    rows: Sequence[Row],
    folder: Path,
    training: Training | None = None,
    seeds: Sequence[int] = SEEDS,
    most: int | None = None,
) -> None:
    """Train every row with every seed, as far as that was not done yet."""
    training = training or Training()
    text = standard_library(training.replicas, most)
    setup = {
        "training": asdict(training),
        "text": {"python": platform.python_version(), "bytes": text.size, "digest": text.digest},
    }
    results = Results.of(folder / "losses.json", setup)
    for seed in seeds:
        for row in rows:
            if str(seed) not in results.found.get(row.name, {}):
                began = time.monotonic()
                loss = loss_of(row, seed, text, training)
                results.add(row.name, str(seed), round(loss, 5))
                seconds = time.monotonic() - began
                print(f"{row.name}, seed {seed}: loss {loss:.4f} ({seconds:.0f} s)", flush=True)


def measure_times(
    rows: Sequence[Row], folder: Path, links: Sequence[str] = tuple(LINKS), times: int = 1
) -> None:
    """Measure every row on every link, as often as it is wanted, as far as that was not done yet.

    One replica alone needs no link.
    """
    training = Training()
    parameters = parameters_of(training)
    setup = {
        "parameters": parameters,
        "replicas": training.replicas,
        "sync_every": training.sync_every,
        "links": {name: asdict(link) for name, link in LINKS.items()},
    }
    results = Results.of(folder / "times.json", setup)
    for number, link, row in product(range(times), links, rows):
        if row.kind == "alone" or len(results.found.get(row.name, {}).get(link, [])) > number:
            continue
        found = time_of(row, parameters, training, LINKS[link])
        results.add_time(row.name, link, found)
        up, down = found.sent / found.planned_sent, found.received / found.planned_received
        print(
            f"{row.name}, {link}: training {found.utilisation:.1%} (planned {found.bound:.1%}), "
            f"up {up:.3f} and down {down:.3f} of the planned bytes",
            flush=True,
        )


def plan_again(folder: Path) -> None:
    """Put what the planner says today beside all times that were measured."""
    results = Results.of(folder / "times.json")
    if not results.found:
        return
    rows, training = {row.name: row for row in ROWS}, Training()

    def again(row: str, link: str, time: Time) -> Time:
        return planned(time, rows[row], results.setup["parameters"], training, LINKS[link])

    results.change_times(again)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench-proof",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what",
        nargs="*",
        choices=("losses", "times", "plans", "page"),
        default=None,
        help="what is to be done (default: all)",
    )
    parser.add_argument(
        "--rows", nargs="+", choices=[row.name for row in ROWS], help="measure only these rows"
    )
    parser.add_argument("--links", nargs="+", choices=list(LINKS), help="measure only these links")
    parser.add_argument(
        "--times",
        type=int,
        default=1,
        help="how often the time of a row is measured on a link; the median counts "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="forget the results that are kept of these rows and links",
    )
    parser.add_argument(
        "--results", type=Path, default=FOLDER, help="where results are kept (default: %(default)s)"
    )
    parser.add_argument(
        "--page", type=Path, default=PAGE, help="where the table is written (default: %(default)s)"
    )
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
