"""Tables that fit a terminal of any width: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Cell(NamedTuple):
    """A piece of text with a style of rich."""

    text: str
    style: str = ""


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: Its heading.
        dropped: Where there is too little room, columns with a larger number are left out first;
            0: never.
        right: Whether its cells are aligned to the right.
    """

    name: str
    dropped: int = 0
    right: bool = False


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int | None
) -> list[list[Cell]]:
    """Return the lines of a table, each as pieces of text.

    Columns without content are left out, and others where the table is wider than the terminal. If
    it is still wider, each row takes two lines, without headings.

    Args:
        columns: The columns.
        rows: One cell per column each.
        width: Columns of the terminal; None for any width.
    """
    if not rows:
        return []
    kept = [
        number
        for number, column in enumerate(columns)
        if not column.dropped or any(row[number].text for row in rows)
    ]
    widths = {
        number: max(len(columns[number].name), *(len(row[number].text) for row in rows))
        for number in kept
    }
    while width is not None and sum(widths[number] + 2 for number in kept) - 2 > width:
        last = max(kept, key=lambda number: columns[number].dropped)
        if not columns[last].dropped:
            return [line for row in rows for line in _stacked([row[number] for number in kept])]
        kept.remove(last)

    def line(cells: Sequence[Cell]) -> list[Cell]:
        pieces = []
        for place, number in enumerate(kept):
            text, style = cells[number]
            room = widths[number]
            padded = text.rjust(room) if columns[number].right else text.ljust(room)
            pieces.append(Cell(padded.rstrip() if place == len(kept) - 1 else f"{padded}  ", style))
        return pieces

    return [line([Cell(column.name, "bold") for column in columns]), *map(line, rows)]


def _stacked(cells: Sequence[Cell]) -> list[list[Cell]]:
    first, *others = cells
    return [[first], [Cell("  "), *others]]
