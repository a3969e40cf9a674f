"""Tables that fit a terminal of any width: pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Facts = Mapping[str, Any]


class Cell(NamedTuple):
    """A piece of text with a style of rich."""

    text: str
    style: str = ""


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: Its heading.
        cell: Returns what it shows of the facts of a row at a moment; by default, the fact that has
            its name.
        dropped: Where there is too little room, columns with a larger number are left out first;
            0: never.
        right: Whether its cells are aligned to the right.
    """

    name: str
    cell: Callable[[Facts, float], Any] | None = None
    dropped: int = 0
    right: bool = False

    def show(self, facts: Facts, now: float) -> Cell:
        """Return its cell in a row; what is not known is empty."""
        value = self.cell(facts, now) if self.cell else facts[self.name.lower()]
        return value if isinstance(value, Cell) else Cell("" if value is None else str(value))


def table(
    columns: Sequence[Column], every: Sequence[Facts], now: float, width: int | None
) -> list[list[Cell]]:
    """Return the lines of a table, each as pieces of text.

    Columns without content are left out, and others where the table is wider than the terminal. If
    it is still wider, each row takes two lines, without headings.

    Args:
        columns: The columns.
        every: The facts of each row.
        now: The time in Unix seconds.
        width: Columns of the terminal; None for any width.
    """
    if not every:
        return []
    cells = {column: [column.show(facts, now) for facts in every] for column in columns}
    kept = [each for each in columns if not each.dropped or any(cell.text for cell in cells[each])]
    room = {each: max(len(text) for text, _ in [(each.name, ""), *cells[each]]) for each in kept}
    while width is not None and sum(room[each] + 2 for each in kept) - 2 > width:
        last = max(kept, key=lambda column: column.dropped)
        if not last.dropped:
            rows = zip(*(cells[each] for each in kept), strict=True)
            return [line for first, *more in rows for line in ([first], [Cell("  "), *more])]
        kept.remove(last)

    def pad(column: Column, cell: Cell) -> Cell:
        align = str.rjust if column.right else str.ljust
        text = align(cell.text, room[column])
        return Cell(text.rstrip() if column is kept[-1] else f"{text}  ", cell.style)

    lines = zip(*([Cell(each.name, "bold"), *cells[each]] for each in kept), strict=True)
    return [list(map(pad, kept, line)) for line in lines]
