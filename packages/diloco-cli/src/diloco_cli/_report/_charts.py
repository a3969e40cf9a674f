"""Charts as SVG in a frame of HTML, so that lines stretch and texts do not: pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from .._texts import duration

_WIDTH, _HEIGHT = 1000.0, 240
_UNITS = (1, 2, 5, 10, 15, 30)
_TIMES = [0.1, 0.2, 0.5, *(n * unit for unit in (1.0, 60.0) for n in _UNITS)]
_TIMES += [n * 3600.0 for n in (1, 2, 3, 6, 12)]
_TIMES += [n * 86_400.0 for n in (1, 2, 5, 10, 30, 100, 300, 1000, 3000, 10_000)]
_SIZES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))

Points = Sequence[tuple[float, float | None]]
Texts = Iterable[tuple[float, str]]


@dataclass(frozen=True)
class Axis:
    """A scale from one value to another.

    Attributes:
        low: The first value.
        high: The last value, which is larger.
        times: Whether the values are seconds.
    """

    low: float
    high: float
    times: bool = False

    def share(self, value: float) -> float:
        """Return where a value is, from 0 to 1; the ends stand for what is beyond them."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def ticks(self) -> list[tuple[float, str]]:
        """Return about six places with a round value, and their texts."""
        rough = (self.high - self.low) / 6
        if self.times:
            step = next((each for each in _TIMES if each >= rough), rough)
        else:
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * 0.999)
        first = math.ceil(self.low / step)
        values = [(first + n) * step for n in range(8)]
        text = seconds if self.times else number
        return [(self.share(value), text(value)) for value in values if value <= self.high]


def make_axis(values: Iterable[float], *, times: bool = False) -> Axis:
    """Return the axis of some values."""
    every = list(values) or [0.0]
    low, high = min(every), max(every)
    if high - low <= abs(high) * 1e-9:
        high = low + max(1.0, abs(low) * 0.1)
    return Axis(low, high, times)


def number(value: float) -> str:
    """Return a number in at most four digits, as people write it.

    >>> number(0.12345), number(1500), number(2_500_000), number(12)
    ('0.1235', '1.5k', '2.5M', '12')
    """
    size, unit = next((each for each in _SIZES if abs(value) >= each[0]), (1.0, ""))
    return f"{value / size:.4g}{unit}"


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


class Bar(NamedTuple):
    """A part of a row: where it begins and ends, from 0 to 1, its class, and what it says."""

    start: float
    end: float
    name: str
    says: str = ""


def row_chart(rows: Sequence[tuple[str, Iterable[Bar]]], below: Texts) -> str:
    """Return a chart with a row for each rank; rows are thin where there are many."""
    height = 22 if len(rows) <= 16 else 12 if len(rows) <= 64 else 4
    shapes = []
    for n, (_, bars) in enumerate(rows):
        for bar in bars:
            wide = max(2.0, (bar.end - bar.start) * _WIDTH)
            left, tall = min(bar.start * _WIDTH, _WIDTH - wide), height * (0.8 if height > 4 else 1)
            path = f"M{left:.1f} {n * height}h{wide:.1f}v{tall:.1f}h-{wide:.1f}z"
            says = f"<title>{escape(bar.says)}</title>" if bar.says else ""
            shapes.append(f'<path class="{bar.name}" d="{path}">{says}</path>')
    every = math.ceil(14 / height)
    names = [((n + 0.4) / len(rows), rows[n][0]) for n in range(0, len(rows), every)]
    return _frame(shapes, len(rows) * height, names, below)


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return what the classes of a chart mean."""
    square = '<svg viewBox="0 0 9 9"><path class="{}" d="M0 0h9v9H0z"/></svg>'
    items = [f"<li>{square.format(name)}{escape(text)}</li>" for name, text in entries]
    return f'<ul class="legend">{"".join(items)}</ul>'
