"""The table in docs/measured.md and its picture, made of the results alone."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from .goals import change, goals, percent
from .picture import svg
from .results import FOLDER, Results
from .rows import LINKS, ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .rows import Row

PACKAGE = Path(__file__).parents[2]
PAGE = PACKAGE / "docs" / "measured.md"
"""Where the table is kept."""
PICTURE = "proof.svg"
"""Where the picture is kept, seen from the table."""

_BEGIN, _END = "<!-- bench-proof -->", "<!-- end of bench-proof -->"
_HEAD = (
    "against",
    "topology",
    "MB up",
    "MB down",
    "s exposed",
    "slow link",
    "the same, S3",
    "fast link",
)


def write(path: Path = PAGE, folder: Path = FOLDER) -> None:
    """Put the table in the place of the one that is in a page, and the picture beside it.

    Raises:
        SystemExit: The page says nowhere that the table belongs there.
    """
    losses, times = Results.of(folder / "losses.json"), Results.of(folder / "times.json")
    before, begin, rest = path.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise SystemExit(f"{path} has no place for the table, between {_BEGIN} and {_END}")
    path.write_text(f"{before}{begin}\n{tables(losses, times)}\n{end}{after}")
    (path.parent / PICTURE).write_text(svg(losses, times))


def tables(losses: Results, times: Results) -> str:
    """The table and what was missed, in Markdown."""
    counts = sorted({len(seeds) for seeds in losses.found.values()} or {0})
    head = ("", f"loss ({' to '.join(map(str, counts))} seeds)", *_HEAD)
    lines = [
        head,
        ("---", *("---:" for _ in head[1:])),
        *(_cells(row, losses, times) for row in ROWS),
    ]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    missed = [f"* {goal.text}" for goal in goals(losses, times) if not goal.met]
    count = len(goals(losses, times))
    if not missed:
        return f"{table}\n\nAll {count} goals are met."
    return "\n".join(
        [table, "", f"Met are {count - len(missed)} of {count} goals. Missed:", "", *missed]
    )


def _cells(row: Row, losses: Results, times: Results) -> list[str]:
    changes = change(row, losses)
    cells = [
        row.label,
        _spread(list(losses.found.get(row.name, {}).values())),
        percent(fmean(changes)) if changes else "",
    ]
    if row.kind == "alone":
        return [*cells, "", "0", "0", "0", *("100 %" for _ in LINKS)]
    found = [times.time(row.name, link) for link in LINKS]
    slow = found[0]
    sizes = [] if slow is None else [slow.sent / 1e6, slow.received / 1e6, slow.exposed]
    return [
        *cells,
        "" if slow is None else slow.topology,
        *([f"{size:.2f}" for size in sizes] or ["", "", ""]),
        *("" if time is None else f"{time.utilisation:.1%} ({time.bound:.1%})" for time in found),
    ]


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"
