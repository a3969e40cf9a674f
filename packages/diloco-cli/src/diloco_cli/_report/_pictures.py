"""The charts of a report, as SVG in a frame of HTML, so that lines stretch and texts do not.

All are pure functions.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby, pairwise
from statistics import median

from .._facts import Facts
from .._texts import duration, number

_WIDTH, _HEIGHT = 1000.0, 240
_UNITS = (1, 2, 5, 10, 15, 30)
_TIMES = [0.1, 0.2, 0.5, *(n * unit for unit in (1.0, 60.0) for n in _UNITS)]
_TIMES += [n * 3600.0 for n in (1, 2, 3, 6, 12)]
_TIMES += [n * 86_400.0 for n in (1, 2, 5, 10, 30, 100, 300, 1000, 3000, 10_000)]
COLOURED = 8
"""As many ranks have a line of their own."""
MOST_ROWS, MOST_LIVES = 200, 10
_MOST_POINTS, _COLUMNS = 20_000, 120  # as many places along a chart, where there is more
_SPENT = {"compute": "compute", "exchange": "exposed exchange", "wait": "wait"}

Ranks = Mapping[int, Sequence[Facts]]
Points = Sequence[tuple[float, float | None]]
Texts = Iterable[tuple[float, str]]
Bar = tuple[float, float, str, str]
"""A part of a row: where it begins and ends, from 0 to 1, its class, and what it says, if that is
not empty."""


class Axis:
    """A scale from the least to the largest of some values.

    Args:
        values: The values.
        times: Whether they are seconds.

    Attributes:
        low: The first value.
        high: The last value, which is larger.
    """

    def __init__(self, values: Iterable[float], *, times: bool = False) -> None:
        every = list(values) or [0.0]
        self.low, self.high, self._times = min(every), max(every), times
        if self.high - self.low <= abs(self.high) * 1e-9:
            self.high = self.low + max(1.0, abs(self.low) * 0.1)

    def share(self, value: float) -> float:
        """Return where a value is, from 0 to 1; the ends stand for what is beyond them."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def ticks(self) -> list[tuple[float, str]]:
        """Return about six places with a round value, and their texts."""
        rough = (self.high - self.low) / 6
        if self._times:
            step = next((time for time in _TIMES if time >= rough), rough)
        else:
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * 0.999)
        first = math.ceil(self.low / step)
        values = [(first + n) * step for n in range(8)]
        text = seconds if self._times else number
        return [(self.share(value), text(value)) for value in values if value <= self.high]


def seconds(value: float) -> str:
    """Return a duration, with a fraction if it is short."""
    return f"{value:.2g}s" if 0 < value < 10 else duration(value)


def line_chart(
    lines: Iterable[tuple[str, Points]],
    band: Sequence[tuple[float, float, float]],
    x: Axis,
    y: Axis,
) -> str:
    """Return a chart of lines.

    Args:
        lines: For each its class, and its points. A point without a value is a mark at the top.
        band: A value of the first axis, and the least and the largest of the second.
        x: The first axis.
        y: The second axis.
    """

    def place(at: float, value: float) -> str:
        return f"{x.share(at) * _WIDTH:.1f} {(1 - y.share(value)) * _HEIGHT:.1f}"

    shapes, marks = [], []
    if band:
        corners = [place(at, low) for at, low, _ in band]
        corners += [place(at, high) for at, _, high in reversed(band)]
        shapes.append(f'<path class="band" d="M{"L".join(corners)}Z"/>')
    for name, points in lines:
        path, pen = [], "M"
        for at, value in points:
            if value is None:
                marks.append(f"M{x.share(at) * _WIDTH:.1f} 0v10")
                pen = "M"
            else:
                # A line of no length shows a point that stands alone.
                path.append(f"{pen}{place(at, value)}" + "h0" * (pen == "M"))
                pen = "L"
        shapes.append(f'<path class="line {name}" d="{"".join(path)}"/>')
    shapes.append(f'<path class="line mark" d="{"".join(marks)}"/>')
    sides = [(1 - at, text) for at, text in y.ticks()]
    grid = "".join(f"M0 {at * _HEIGHT:.1f}h{_WIDTH:g}" for at, _ in sides)
    return _frame([f'<path class="grid" d="{grid}"/>', *shapes], _HEIGHT, sides, x.ticks())


def _frame(shapes: Iterable[str], height: int, sides: Texts, below: Texts) -> str:
    """Return a drawing with texts at its left side and below; 0 is at the top, and at the left."""
    texts = [f'<b style="top:{at:.2%}">{escape(text)}</b>' for at, text in sides]
    texts += [f'<i style="left:{at:.2%}">{escape(text)}</i>' for at, text in below]
    return (
        f'<div class="chart" style="height:{height}px"><svg viewBox="0 0 {_WIDTH:g} {height}" '
        f'preserveAspectRatio="none">{"".join(shapes)}</svg>{"".join(texts)}</div>'
    )


def row_chart(rows: Sequence[tuple[str, Iterable[Bar]]], below: Texts) -> str:
    """Return a chart with a row for each rank; rows are thin where there are many."""
    height = 22 if len(rows) <= 16 else 12 if len(rows) <= 64 else 4
    shapes = []
    for n, (_, bars) in enumerate(rows):
        for start, end, name, text in bars:
            wide = max(2.0, (end - start) * _WIDTH)
            left, tall = min(start * _WIDTH, _WIDTH - wide), height * (0.8 if height > 4 else 1)
            path = f"M{left:.1f} {n * height}h{wide:.1f}v{tall:.1f}h-{wide:.1f}z"
            says = f"<title>{escape(text)}</title>" if text else ""
            shapes.append(f'<path class="{name}" d="{path}">{says}</path>')
    every = math.ceil(14 / height)
    names = [((n + 0.4) / len(rows), rows[n][0]) for n in range(0, len(rows), every)]
    return _frame(shapes, len(rows) * height, names, below)


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return what the classes of a chart mean."""
    square = '<svg viewBox="0 0 9 9"><path class="{}" d="M0 0h9v9H0z"/></svg>'
    items = [f"<li>{square.format(name)}{escape(text)}</li>" for name, text in entries]
    return f'<ul class="legend">{"".join(items)}</ul>'


def ranks_with_a_row(incarnations: Iterable[Facts]) -> dict[int, list[Facts]]:
    """Return ranks with their newest incarnations: all, or those of note and the first ones."""
    ranks: dict[int, list[Facts]] = defaultdict(list)
    for life in incarnations:
        ranks[life["rank"]].append(life)

    def is_plain(rank: int) -> bool:
        lives = ranks[rank]
        return len(lives) == 1 and lives[0]["ended"] != "failed" and not lives[0]["losses_wrong"]

    chosen = sorted(ranks, key=lambda rank: (is_plain(rank), rank))[:MOST_ROWS]
    return {rank: ranks[rank][-MOST_LIVES:] for rank in sorted(chosen)}


def loss_chart(summary: Facts, *, by_time: bool) -> str:
    """Return the loss of each rank, or their middle and range where there are many."""
    start = summary["first"] or 0.0
    points: dict[int, list[tuple[float, float | None]]] = defaultdict(list)
    for life in summary["incarnations"]:
        for step, time, value in life["losses"]:
            points[life["rank"]].append((time - start if by_time else step, value))
    every = [point for series in points.values() for point in series]
    values = [value for _, value in every if value is not None]
    if not values:
        return "<p>No metric with “loss” in its name was logged, or there is no history yet.</p>"
    x, y = time_axis(summary) if by_time else Axis(at for at, _ in every), Axis(values)
    entries = [(f"c{n}", f"rank {rank}") for n, rank in enumerate(points)]
    lines: list[tuple[str, Points]] = [(f"c{n}", curve) for n, curve in enumerate(points.values())]
    band = []
    if len(points) > COLOURED or len(every) > _MOST_POINTS:
        folded = _folded(points.values(), x)
        lines = [("middle", [(at, median(values)) for at, values in folded])]
        lines.append(("", [point for point in every if point[1] is None][:_COLUMNS]))
        band = [(at, min(values), max(values)) for at, values in folded]
        entries = [("middle", f"the middle of all ranks ({len(points)})")]
        entries.append(("band", "from the lowest to the highest"))
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
    return Axis([0.0, (summary["last"] or 0.0) - (summary["first"] or 0.0)], times=True)


def time_split(lives: Sequence[Facts]) -> dict[str, float]:
    """Return seconds by what they were spent on."""
    return {name: sum(life["seconds"][name] for life in lives) for name in _SPENT}


def split_chart(ranks: Ranks) -> str:
    """Return how the time of each rank was spent."""
    rows = []
    for rank, lives in ranks.items():
        split, at = time_split(lives), 0.0
        bars: list[Bar] = []
        for name, spent in split.items():
            if spent:
                share = spent / sum(split.values())
                says = f"rank {rank}, {name}: {seconds(spent)}, {share:.0%}"
                bars.append((at, at + share, name, says))
                at += share
        rows.append((str(rank), bars))
    return legend(_SPENT.items()) + row_chart(rows, [(n / 4, f"{n * 25}%") for n in range(5)])


def lives_chart(summary: Facts, ranks: Ranks) -> str:
    """Return the incarnations of each rank on a time axis."""
    x, start = time_axis(summary), summary["first"] or 0.0

    def bar(life: Facts) -> Bar:
        name = life["ended"] if life["ended"] in {"left", "failed"} else "open"
        attempt = life["attempt"] or "unknown"
        says = f"rank {life['rank']}, incarnation {life['epoch']}, attempt {attempt}"
        return x.share(life["first"] - start), x.share(life["last"] - start), name, says

    rows = [(str(rank), map(bar, lives)) for rank, lives in ranks.items()]
    entries = [("left", "left"), ("failed", "failed"), ("open", "did not tell its end")]
    return legend(entries) + row_chart(rows, x.ticks())


def members_chart(summary: Facts, ranks: Ranks) -> str:
    """Return which ranks were in which syncs; where there are many, several share a place."""
    if not (syncs := summary["syncs"]):
        return "<p>No outer step was told of.</p>"
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


def _joined(names: Sequence[str]) -> Iterator[Bar]:
    """Yield bars over neighbours of one class."""
    at = 0
    for name, neighbours in groupby(names):
        start, at = at, at + len(list(neighbours))
        if name:
            yield start / len(names), at / len(names), name, ""
