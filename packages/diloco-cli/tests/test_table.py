"""Tables fit terminals."""

import pytest

from diloco_cli._facts import Cell, Column, table

COLUMNS = (
    Column("RANK", right=True),
    Column("STATE"),
    Column("WHY", dropped=1),
    Column("NONE", dropped=2),
)
ROWS = [
    {"rank": 0, "state": Cell("running", "cyan"), "why": None, "none": ""},
    {"rank": 10, "state": "failed", "why": "evicted", "none": ""},
]


def texts(width):
    return ["".join(cell.text for cell in line) for line in table(COLUMNS, ROWS, 0.0, width)]


def test_without_a_terminal_all_columns_are_there():
    assert texts(None) == ["RANK  STATE    WHY", "   0  running  ", "  10  failed   evicted"]


def test_columns_that_do_not_fit_are_left_out():
    assert texts(22) == texts(None)
    assert texts(21) == ["RANK  STATE", "   0  running", "  10  failed"]


def test_what_fits_nowhere_is_stacked():
    assert texts(10) == ["0", "  running", "10", "  failed"]


def test_styles_stay():
    assert [cell.style for cell in table(COLUMNS, ROWS, 0.0, None)[1]] == ["", "cyan", ""]


@pytest.mark.parametrize("width", [None, 1, 80])
def test_no_rows_no_table(width):
    assert table(COLUMNS, [], 0.0, width) == []
