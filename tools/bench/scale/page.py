"""The page of the documentation that holds the tables, and the picture beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .figures import plan_of, sync_of
from .picture import Point, svg
from .table import START, SYNC, conditions, markdown, start_cells, sync_cells

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .cohort import Outcome, Run
    from .s3 import S3

_BEGIN, _END = "<!-- bench-scale -->", "<!-- end of bench-scale -->"


def write(path: Path, s3: S3, done: Sequence[tuple[Run, Outcome | None]]) -> None:
    """Put the tables into a file, in place of those there or anew, and the picture beside it.

    Args:
        path: The file, in Markdown.
        s3: What was assumed of the store.
        done: What was run and what came of it; None where it was only planned.

    Raises:
        SystemExit: The file says nowhere that the tables belong there.
    """
    text = path.read_text() if path.exists() else f"{_BEGIN}\n{_END}\n"
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise SystemExit(f"{path} has no place for the tables, between {_BEGIN} and {_END}")
    syncs = markdown(SYNC, [sync_cells(*each) for each in done])
    starts = markdown(
        START, [start_cells(run, outcome) for run, outcome in done if outcome is not None]
    )
    tables = (
        f"Assumed: {conditions(s3)}.\n\n"
        "A steady sync, counted / planned:\n\n"
        f"{syncs}\n\n"
        "The start:\n\n"
        f"{starts}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{before}{begin}\n{tables}\n{end}{after}")
    path.with_suffix(".svg").write_text(svg(_panels(done)))


def _panels(done: Sequence[tuple[Run, Outcome | None]]) -> dict[str, dict[float, list[Point]]]:
    panels: dict[str, dict[float, list[Point]]] = {}
    for run, outcome in done:
        seconds = None if outcome is None else sync_of(run, outcome).seconds
        parameters = round(run.parameters) if outcome is None else outcome.parameters
        point = Point(run.replicas, seconds, plan_of(run, parameters).seconds)
        panels.setdefault(run.kind, {}).setdefault(run.parameters, []).append(point)
    return panels
