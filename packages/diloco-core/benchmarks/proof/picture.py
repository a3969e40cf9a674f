"""The picture, as SVG: what every row's loss is, and how much of the time it trains."""

from __future__ import annotations

from html import escape
from statistics import fmean
from typing import TYPE_CHECKING

from .rows import LINKS, ROWS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .results import Results

# As in tools/bench/scale: told apart by those who see colours otherwise, too, on any ground.
_COLOURS = ("#0072b2", "#009e73", "#d55e00")
_LABELS, _WIDTH, _GAP = 230, 260, 60  # pixels
_ROW, _TOP, _BOTTOM = 34, 44, 64
_STYLE = (
    "text{font:12px "
    "sans-serif;fill:#777}.t{font-weight:bold;font-size:14px}.g{stroke:#7774;stroke-width:1}.p{stroke:#777;stroke-width:2}"
)


def svg(losses: Results, times: Results) -> str:
    """Return the picture, with a line for every row.

    It has a panel for the loss and one for the share of time in training.
    """
    height = _TOP + _ROW * len(ROWS) + _BOTTOM
    width = _LABELS + 2 * (_WIDTH + _GAP)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}">',
            f"<style>{_STYLE}</style>",
            *(
                f'<text x="{_LABELS - 16}" y="{_middle(number) + 4}" text-anchor="end">'
                f"{escape(row.label)}</text>"
                for number, row in enumerate(ROWS)
            ),
            f'<g transform="translate({_LABELS},0)">',
            *_losses(losses),
            f'</g><g transform="translate({_LABELS + _WIDTH + _GAP},0)">',
            *_times(times),
            "</g></svg>",
            "",
        ]
    )


def _losses(losses: Results) -> Iterator[str]:
    """Every seed as a dot, and a stroke at their mean."""
    every = [value for row in ROWS for value in losses.found.get(row.name, {}).values()]
    least, most = (
        (int(10 * min(every)) / 10, int(10 * max(every) + 1) / 10) if every else (0.0, 1.0)
    )
    steps = round(10 * (most - least))
    yield from _frame(
        "loss in the end, nats per byte",
        [(step / steps, f"{least + step / 10:.1f}") for step in range(steps + 1)],
    )
    for number, row in enumerate(ROWS):
        values = list(losses.found.get(row.name, {}).values())
        places = [_WIDTH * (value - least) / (most - least) for value in values]
        for x in places:
            yield f'<circle cx="{x:.1f}" cy="{_middle(number)}" r="3" fill="{_COLOURS[0]}"/>'
        if places:
            yield f'<path class="p" d="M{fmean(places):.1f} {_middle(number) - 8}v16"/>'


def _times(times: Results) -> Iterator[str]:
    """A bar for every link, and a stroke where the planner has it."""
    yield from _frame(
        "share of the time in training", [(share / 4, f"{25 * share} %") for share in range(5)]
    )
    thick = (_ROW - 10) / len(LINKS)
    for number, row in enumerate(ROWS):
        for index, link in enumerate(LINKS):
            y = _middle(number) - (_ROW - 10) / 2 + index * thick
            time = times.time(row.name, link)
            share, planned = (
                (1.0, None)
                if row.kind == "alone"
                else (0.0, None)
                if time is None
                else (time.utilisation, time.bound)
            )
            yield (
                f'<path fill="{_COLOURS[index]}" '
                f'd="M0 {y:.1f}h{_WIDTH * share:.1f}v{thick - 1:.1f}H0z"/>'
            )
            if planned is not None:
                yield f'<path class="p" d="M{_WIDTH * planned:.1f} {y - 1:.1f}v{thick + 1:.1f}"/>'
    y = _middle(len(ROWS)) + 20
    for index, link in enumerate(LINKS.values()):
        x = 95 * index
        label = f"{link.bandwidth / 1e6:g} MB/s" + (", S3" if link.over == "s3" else "")
        yield (
            f'<path fill="{_COLOURS[index]}" d="M{x} {y - 9}h12v9h-12z"/>'
            f'<text x="{x + 17}" y="{y}">{escape(label)}</text>'
        )
    yield f'<path class="p" d="M6 {y + 8}v12"/><text x="17" y="{y + 18}">as planned</text>'


def _frame(title: str, ticks: list[tuple[float, str]]) -> Iterator[str]:
    yield f'<text class="t" x="0" y="20">{escape(title)}</text>'
    bottom = _TOP + _ROW * len(ROWS)
    for share, label in ticks:
        x = _WIDTH * share
        yield f'<path class="g" d="M{x:.1f} {_TOP}V{bottom}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{escape(label)}</text>'


def _middle(number: int) -> int:
    return _TOP + _ROW * number + _ROW // 2
