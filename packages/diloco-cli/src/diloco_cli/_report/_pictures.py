"""The charts of a report: pure functions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

from .._table import Facts
from ._charts import Axis, Bar, Points, legend, line_chart, make_axis, row_chart, seconds
from ._replicas import Incarnation

COLOURED = 8
"""As many ranks have a line of their own."""
MOST_ROWS, MOST_LIVES = 200, 10
_MOST_POINTS = 20_000
_COLUMNS = 120  # as many places along a chart, where there is more
_SPENT = {"compute": "compute", "exchange": "exposed exchange", "wait": "wait"}

Ranks = Mapping[int, Sequence[Incarnation]]


def ranks_with_a_row(incarnations: Iterable[Incarnation]) -> dict[int, list[Incarnation]]:
    """Return ranks with their newest incarnations: all, or those of note and the first ones."""
    ranks: dict[int, list[Incarnation]] = defaultdict(list)
    for each in incarnations:
        ranks[each.rank].append(each)

    def is_plain(rank: int) -> bool:
        lives = ranks[rank]
        return len(lives) == 1 and lives[0].ended != "failed" and not lives[0].losses_wrong

    chosen = sorted(ranks, key=lambda rank: (is_plain(rank), rank))[:MOST_ROWS]
    return {rank: ranks[rank][-MOST_LIVES:] for rank in sorted(chosen)}


def loss_chart(summary: Facts, *, by_time: bool) -> str:
    """Return the loss of each rank, or their middle and range where there are many."""
    start = summary["first"] or 0.0
    points: dict[int, list[tuple[float, float | None]]] = defaultdict(list)
    for each in summary["incarnations"]:
        for step, time, value in each.losses:
            points[each.rank].append((time - start if by_time else step, value))
    every = [point for series in points.values() for point in series]
    values = [value for _, value in every if value is not None]
    if not values:
        return "<p>There is no loss to show.</p>"
    x, y = time_axis(summary) if by_time else make_axis(at for at, _ in every), make_axis(values)
    entries = [(f"c{n}", f"rank {rank}") for n, rank in enumerate(points)]
    lines: list[tuple[str, Points]] = [(f"c{n}", each) for n, each in enumerate(points.values())]
    band = []
    if len(points) > COLOURED or len(every) > _MOST_POINTS:
        folded = _folded(points.values(), x)
        lines = [("middle", [(at, median(values)) for at, values in folded])]
        lines.append(("", [point for point in every if point[1] is None][:_COLUMNS]))
        band = [(at, min(values), max(values)) for at, values in folded]
        entries = [
            ("middle", f"the middle of all ranks ({len(points)})"),
            ("band", "from the lowest to the highest"),
        ]
    if len(values) < len(every):
        entries.append(("mark", "a loss that is not a number"))
    return legend(entries) + line_chart(lines, band, x, y)


def _folded(every: Iterable[Points], x: Axis) -> list[tuple[float, list[float]]]:
    """Return for each part of an axis its middle, and the last value of each rank in it."""
    parts: dict[int, dict[int, float]] = defaultdict(dict)
    for rank, points in enumerate(every):
        for at, value in points:
            if value is not None:
                parts[min(_COLUMNS - 1, int(x.share(at) * _COLUMNS))][rank] = value
    width = (x.high - x.low) / _COLUMNS
    return [(x.low + (n + 0.5) * width, list(parts[n].values())) for n in sorted(parts)]


def time_axis(summary: Facts) -> Axis:
    """Return the axis from the first to the last sign."""
    return make_axis([0.0, (summary["last"] or 0.0) - (summary["first"] or 0.0)], times=True)


def time_split(lives: Iterable[Incarnation]) -> dict[str, float]:
    """Return seconds by what they were spent on."""
    several = list(lives)
    return {name: sum(each.seconds[name] for each in several) for name in _SPENT}


def split_chart(ranks: Ranks) -> str:
    """Return how the time of each rank was spent."""
    rows = []
    for rank, lives in ranks.items():
        split, bars, at = time_split(lives), [], 0.0
        for name, spent in split.items():
            if spent:
                share = spent / sum(split.values())
                says = f"rank {rank}, {name}: {seconds(spent)}, {share:.0%}"
                bars.append(Bar(at, at + share, name, says))
                at += share
        rows.append((str(rank), bars))
    return legend(_SPENT.items()) + row_chart(rows, [(n / 4, f"{n * 25}%") for n in range(5)])


def lives_chart(summary: Facts, ranks: Ranks) -> str:
    """Return the incarnations of each rank on a time axis."""
    x, start = time_axis(summary), summary["first"] or 0.0

    def bar(life: Incarnation) -> Bar:
        name = life.ended if life.ended in {"left", "failed"} else "open"
        says = f"rank {life.rank}, incarnation {life.epoch}, attempt {life.attempt or 'unknown'}"
        return Bar(x.share(life.first - start), x.share(life.last - start), name, says)

    rows = [(str(rank), map(bar, lives)) for rank, lives in ranks.items()]
    entries = [("left", "left"), ("failed", "failed"), ("open", "did not tell its end")]
    return legend(entries) + row_chart(rows, x.ticks())


def members_chart(summary: Facts, ranks: Ranks) -> str:
    """Return which ranks were in which syncs; where there are many, several share a place."""
    syncs = summary["syncs"]
    columns = min(len(syncs), _COLUMNS)
    places = [len(syncs) * n // columns for n in range(columns + 1)]
    counted: Counter[tuple[int, int]] = Counter()
    later: Counter[tuple[int, int]] = Counter()
    for n, (start, end) in enumerate(pairwise(places)):
        for sync in syncs[start:end]:
            counted.update((rank, n) for rank in sync["counted"])
            later.update((rank, n) for rank in sync["later"])

    def name(rank: int, n: int) -> str:
        if counted[rank, n] == places[n + 1] - places[n]:
            return "counted"
        return "later" if counted[rank, n] or later[rank, n] else ""

    rows = [(str(rank), _joined([name(rank, n) for n in range(columns)])) for rank in ranks]
    step = max(1, -(-columns // 5))
    below = [((n + 0.5) / columns, str(syncs[places[n]]["sync"])) for n in range(0, columns, step)]
    some = "in some of the syncs, or later" if columns < len(syncs) else "later, or not known"
    return legend([("counted", "in the sync"), ("later", some)]) + row_chart(rows, below)


def _joined(names: Sequence[str]) -> list[Bar]:
    """Return bars over neighbours of one class."""
    bars: list[Bar] = []
    for n, name in enumerate(names):
        start, end = n / len(names), (n + 1) / len(names)
        if bars and bars[-1].name == name and bars[-1].end == start:
            bars[-1] = bars[-1]._replace(end=end)
        elif name:
            bars.append(Bar(start, end, name))
    return bars
