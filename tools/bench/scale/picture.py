"""A picture, as SVG, of how long a sync takes as replicas grow.

One panel for every kind of run, one line for every size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from .table import number, short

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Told apart by those who see colours otherwise, too (Okabe and Ito), on light and on dark ground.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
_WIDTH, _HEIGHT = 300, 260  # of a panel's plot, in pixels
_LEFT, _TOP, _GAP, _BOTTOM = 60, 40, 70, 75
_STYLE = (
    "text{font:12px sans-serif;fill:#777}"
    ".t{font-weight:bold;font-size:14px}"
    ".g{stroke:#7774;stroke-width:1}"
    ".m{fill:none;stroke-width:2}"
    ".p{fill:none;stroke-width:1.5;stroke-dasharray:4 4}"
)


@dataclass(frozen=True, slots=True)
class Point:
    """What is known of one number of replicas.

    Attributes:
        replicas: Their number.
        seconds: Of a sync, as counted; None where it was only planned.
        planned: As foreseen.
    """

    replicas: int
    seconds: float | None
    planned: float


def svg(panels: Mapping[str, Mapping[float, Sequence[Point]]]) -> str:
    """The picture: for every kind and every number of parameters its points.

    Both axes are logarithmic.
    """
    points = [point for lines in panels.values() for line in lines.values() for point in line]
    sizes = sorted({size for lines in panels.values() for size in lines})
    axes = _Axes(
        sorted({point.replicas for point in points}),
        [
            seconds
            for point in points
            for seconds in (point.seconds, point.planned)
            if seconds is not None
        ],
    )
    width = _LEFT + len(panels) * (_WIDTH + _GAP)
    height = _TOP + _HEIGHT + _BOTTOM
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}">'
        ),
        f"<style>{_STYLE}</style>",
    ]
    for index, (kind, lines) in enumerate(panels.items()):
        parts.append(f'<g transform="translate({_LEFT + index * (_WIDTH + _GAP)},{_TOP})">')
        parts += _panel(kind, lines, sizes, axes)
        parts.append("</g>")
    parts += _legend(sizes, _TOP + _HEIGHT + 55)
    return "\n".join([*parts, "</svg>", ""])


class _Axes:
    """Where numbers of replicas and seconds lie in a panel."""

    def __init__(self, replicas: Sequence[int], seconds: Sequence[float]) -> None:
        self.replicas = replicas
        least, most = math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(seconds)))
        self.seconds = [10.0**power for power in range(least, most + 1)]

    def x(self, replicas: float) -> float:
        first, last = math.log2(self.replicas[0]), math.log2(self.replicas[-1])
        return _WIDTH * (math.log2(replicas) - first) / ((last - first) or 1)

    def y(self, seconds: float) -> float:
        first, last = math.log10(self.seconds[0]), math.log10(self.seconds[-1])
        return _HEIGHT * (1 - (math.log10(seconds) - first) / ((last - first) or 1))


def _panel(
    kind: str, lines: Mapping[float, Sequence[Point]], sizes: Sequence[float], axes: _Axes
) -> Iterator[str]:
    yield f'<text class="t" x="0" y="-14">{escape(kind)}</text>'
    for seconds in axes.seconds:
        y = axes.y(seconds)
        yield f'<path class="g" d="M0 {y:.1f}H{_WIDTH}"/>'
        yield f'<text x="-8" y="{y + 4:.1f}" text-anchor="end">{number(seconds)} s</text>'
    for replicas in axes.replicas:
        x = axes.x(replicas)
        yield f'<path class="g" d="M{x:.1f} 0V{_HEIGHT}"/>'
        yield f'<text x="{x:.1f}" y="{_HEIGHT + 18}" text-anchor="middle">{replicas}</text>'
    for size, line in lines.items():
        colour = _COLOURS[sizes.index(size) % len(_COLOURS)]
        ordered = sorted(line, key=lambda point: point.replicas)
        planned = [(axes.x(p.replicas), axes.y(p.planned)) for p in ordered]
        counted = [
            (axes.x(p.replicas), axes.y(p.seconds)) for p in ordered if p.seconds is not None
        ]
        for style, places in (("p", planned), ("m", counted)):
            if places:
                points = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
                yield f'<path class="{style}" stroke="{colour}" d="M{points}"/>'
        yield from (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in counted
        )


def _legend(sizes: Sequence[float], y: float) -> Iterator[str]:
    x = float(_LEFT)
    for index, size in enumerate(sizes):
        yield f'<path class="m" stroke="{_COLOURS[index % len(_COLOURS)]}" d="M{x} {y}h24"/>'
        yield f'<text x="{x + 30}" y="{y + 4}">{short(size)}</text>'
        x += 90
    yield (
        f'<path class="p" stroke="#777" d="M{x} {y}h24"/>'
        f'<text x="{x + 30}" y="{y + 4}">as planned</text>'
    )
    yield f'<text x="{x + 130}" y="{y + 4}">seconds of a sync by number of replicas</text>'
