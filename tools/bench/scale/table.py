"""The tables that are printed, in Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .figures import plan_of, start_of, sync_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cohort import Outcome, Run
    from .s3 import S3

SYNC = (
    "", "parameters", "N", "seconds", "GET", "PUT", "LIST", "DELETE", "HEAD", "round trips",
    "MB up", "MB down", "$ of all",
)  # fmt: skip
"""Columns of the table of syncs; what is planned stands behind what was counted."""
START = (
    "",
    "parameters",
    "N",
    "seconds",
    "GET",
    "PUT",
    "LIST",
    "DELETE",
    "HEAD",
    "round trips",
    "MB up",
    "MB down",
)
"""Columns of the table of starts."""


def sync_cells(run: Run, outcome: Outcome | None) -> list[str]:
    """A line of the table of syncs; without an outcome, of what is planned alone."""
    plan = plan_of(run, round(run.parameters) if outcome is None else outcome.parameters)
    found = None if outcome is None else sync_of(run, outcome)
    requests = {} if found is None else found.requests
    return [
        run.kind,
        short(run.parameters),
        str(run.replicas),
        both(found and found.seconds, plan.seconds),
        both(requests.get("GET"), plan.gets),
        both(requests.get("PUT"), plan.puts),
        both(requests.get("LIST"), plan.lists),
        both(requests.get("DELETE"), plan.deletes),
        "-" if found is None else number(found.requests["HEAD"]),
        "-" if found is None else number(found.waits),
        both(found and found.sent / 1e6, plan.bytes_sent / 1e6),
        both(found and found.received / 1e6, plan.bytes_received / 1e6),
        both(found and found.dollars, plan.cost),
    ]


def start_cells(run: Run, outcome: Outcome) -> list[str]:
    """A line of the table of starts."""
    found = start_of(run, outcome)
    requests = [number(found.requests[kind]) for kind in ("GET", "PUT", "LIST", "DELETE", "HEAD")]
    traffic = [number(found.waits), number(found.sent / 1e6), number(found.received / 1e6)]
    return [
        run.kind,
        short(run.parameters),
        str(run.replicas),
        number(found.seconds),
        *requests,
        *traffic,
    ]


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table."""
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(line(row, widths) for row in rows)


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """A row of a table, in columns of these widths."""
    padded = zip(cells, widths, strict=True)
    first, *rest = (
        cell.rjust(width) if index else cell.ljust(width)
        for index, (cell, width) in enumerate(padded)
    )
    return "| " + " | ".join([first, *rest]) + " |"


def conditions(s3: S3) -> str:
    """What is assumed of the store."""
    rates = "no limit to the rate of requests"
    if s3.reads != float("inf"):
        rates = (
            f"at most {s3.reads:,.0f} reads and {s3.writes:,.0f} writes per second below the prefix"
        )
    return (
        f"{1000 * s3.latency:g} ms for a request, {s3.connection / 1e6:g} MB/s for a connection, "
        f"{s3.network / 1e9:g} GB/s for a replica, {rates}"
    )


def short(value: float) -> str:
    """A number of parameters."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def both(counted: float | None, planned: float) -> str:
    """A figure as it was counted, and as it was planned."""
    return f"{'-' if counted is None else number(counted)} / {number(planned)}"


def number(value: float) -> str:
    """A figure with as many digits as somebody wants to read."""
    if value == 0:
        return "0"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 10 else f"{value:.1f}".removesuffix(".0")
