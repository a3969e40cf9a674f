"""Facts about runs as JSON values, exit codes, and the tables that people see: pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from diloco_protocol import (
    BackendError,
    DilocoError,
    InvalidRequestError,
    MissingDependencyError,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaStatus,
    ResultLostError,
)
from diloco_protocol.backend import redact, redact_json
from diloco_protocol.telemetry import Live, Metric

from ._texts import clean, duration, ranks_in_words

Facts = Mapping[str, Any]
CODES = SUCCEEDED, FAILED, BAD_USE, UNKNOWN, UNREACHABLE, FAULT = 0, 1, 2, 3, 4, 70
VERSION = 1
"""The version of what ``--json`` prints."""
STYLES = {
    "pending": "yellow", "running": "cyan", "succeeded": "green", "failed": "red",
    "cancelled": "magenta", "unknown": "red",
}  # fmt: skip
ENDS = {None: "running", "left": "succeeded", "failed": "failed"}
"""The states that the words of replicas on their end mean; other words mean an unknown one."""
NAMES = tuple(field.name for field in fields(Live) if field.name not in {"run", "world_size"})
"""What is told of a rank."""
_STATUS = tuple(field.name for field in fields(ReplicaStatus))
_RESULT = 200  # characters of a result that people see


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
    has_text = {column: any(cell.text for cell in cells[column]) for column in columns}
    kept = [column for column in columns if not column.dropped or has_text[column]]
    room = {
        column: max(len(text) for text, _ in [(column.name, ""), *cells[column]]) for column in kept
    }
    while width is not None and sum(room[column] + 2 for column in kept) - 2 > width:
        last = max(kept, key=lambda column: column.dropped)
        if not last.dropped:
            rows = zip(*(cells[column] for column in kept), strict=True)
            return [line for first, *more in rows for line in ([first], [Cell("  "), *more])]
        kept.remove(last)

    def pad(column: Column, cell: Cell) -> Cell:
        align = str.rjust if column.right else str.ljust
        text = align(cell.text, room[column])
        return Cell(text.rstrip() if column is kept[-1] else f"{text}  ", cell.style)

    lines = zip(*([Cell(column.name, "bold"), *cells[column]] for column in kept), strict=True)
    return [list(map(pad, kept, line)) for line in lines]


def place_of(handles: Sequence[ReplicaHandle]) -> dict[str, str]:
    """Return what the handles of a run have in common: the cluster, account or host, and names."""
    common = dict(handles[0].metadata)
    for handle in handles:
        common = {key: text for key, text in common.items() if handle.metadata.get(key) == text}
    return {clean(key): clean(redact(key, text)) for key, text in common.items()}


def place_in_words(backend: str, place: Mapping[str, str]) -> str:
    """Return a backend and a place as people read them."""
    where = ", ".join(f"{key} {text}" for key, text in place.items())
    return f"{backend} ({where})" if where else backend


def replica_facts(handle: ReplicaHandle, status: ReplicaStatus | None) -> dict[str, Any]:
    """Return the facts about one replica; None stands for a replica without a record."""
    facts = {name: getattr(status, name, None) for name in _STATUS}
    if status is None:
        facts |= {"state": "unknown", "stopping": False, "native": ""}
        facts["message"] = "there is no record of it"
    return {"rank": handle.rank, **plain(facts)}


def result_facts(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about one entry of what ``collect`` returns; lost replicas are unknown."""
    names = ("reason", "attempt", "exit_code", "signal", "error")
    state = "unknown" if result["reason"] == "lost" else result["status"]
    facts = plain({"state": state, **{name: result[name] for name in names}})
    return {"rank": result["rank"], **facts, "result": redact_json(result["result"])}


def plain(facts: Facts) -> dict[str, Any]:
    """Return facts with texts that are safe to print."""
    return {key: clean(str(fact)) if isinstance(fact, str) else fact for key, fact in facts.items()}


def counts(states: Iterable[str | None]) -> dict[str, int]:
    """Return how many replicas are in each state, in the order of a replica's life."""
    tally = Counter(states)
    return {state: tally[state] for state in STYLES if tally[state]}


def counts_in_words(states: Mapping[str, int]) -> str:
    """Return numbers of replicas as people read them.

    >>> counts_in_words({"running": 3, "failed": 1})
    '3 running, 1 failed'
    """
    return ", ".join(f"{count} {state}" for state, count in states.items())


def ago(facts: Facts, now: float) -> str:
    """Return since when something runs."""
    started = facts.get("started_at")
    return "" if started is None else f"{duration(now - started)} ago"


def _took(facts: Facts, now: float) -> str:
    return ago(facts, facts.get("finished_at") or now).removesuffix(" ago")


def state_cell(facts: Facts, now: float) -> Cell:
    """Return the state of a replica, and how old it is if its backend is silent."""
    words = (facts["state"] or "") + ", stopping" * bool(facts.get("stopping"))
    if words and facts.get("state_since") is not None:
        words += f" {duration(now - facts['state_since'])} ago"
    return Cell(words, STYLES.get(facts["state"], ""))


REPLICA_COLUMNS = (
    Column("RANK", right=True),
    Column("STATE", state_cell),
    Column("REASON", dropped=2),
    Column("ATTEMPT", dropped=4, right=True),
    Column("EXIT", lambda facts, _: facts["signal"] or facts["exit_code"], dropped=3),
    Column("STARTED", ago, dropped=6),
    Column("TOOK", _took, dropped=5),
)


def replica_lines(replicas: Sequence[Facts], now: float, width: int | None) -> list[list[Cell]]:
    """Return the table of replicas, and what is said about them."""
    lines = [[Cell(text)] for text in said(replicas)]
    return table(REPLICA_COLUMNS, replicas, now, width) + lines


def said(replicas: Iterable[Facts]) -> list[str]:
    """Return what is said about replicas, in which each text stands once."""
    ranks_by_text: dict[str, list[int]] = {}
    for facts in replicas:
        texts = [facts.get("message") or facts.get("error") or ""]
        if facts.get("result") is not None:
            texts.append(f"result {clean(str(facts['result']), _RESULT)}")
        for text in filter(None, texts):
            ranks_by_text.setdefault(text, []).append(facts["rank"])
    named = {text: ranks_in_words(ranks) for text, ranks in ranks_by_text.items()}
    return [f"{name}: {text.removeprefix(f'{name} ')}" for text, name in named.items()]


def _run_state(facts: Facts, _: float) -> Cell:
    states = facts["states"]
    only = next(iter(states)) if len(states) == 1 else ""
    return Cell(counts_in_words(states) or "unknown", STYLES.get(only, ""))


RUN_COLUMNS = (
    Column("RUN", lambda facts, _: facts["run_id"]),
    Column("STATE", _run_state),
    Column("BACKEND", dropped=2),
    Column("REPLICAS", dropped=4, right=True),
    Column("STARTED", ago, dropped=3),
)


def loss_name(metrics: Iterable[str]) -> str:
    """Return the metric that is the loss: ``loss``, or else the first with that in its name.

    It is empty if there is none.
    """
    names = sorted(name for name in set(metrics) if "loss" in name.lower())
    return "loss" if "loss" in names else next(iter(names), "")


def shown_value(value: Metric) -> str:
    """Return the value of a metric as people see it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def exit_of_states(states: Iterable[str]) -> int:
    """Return the exit code for the states of a run's replicas.

    A run that goes on counts as succeeded so far. One that failed is known to have failed, even if
    other replicas are lost.

    Args:
        states: ``pending``, ``running``, ``succeeded``, ``failed``, ``cancelled`` or ``unknown``.
    """
    seen = set(states)
    if seen & {"pending", "running"}:
        return SUCCEEDED
    if seen & {"failed", "cancelled"}:
        return FAILED
    return UNKNOWN if "unknown" in seen else SUCCEEDED


def exit_of_error(error: Exception) -> int:
    """Return the exit code for an error that ended a verb."""
    if isinstance(error, (ReplicaNotFoundError, ResultLostError)):
        return UNKNOWN
    if not isinstance(error, DilocoError):
        return FAULT
    if isinstance(error, BackendError) and not isinstance(error, InvalidRequestError):
        return UNREACHABLE  # also where a backend's record is damaged, which some call a ValueError
    return BAD_USE if isinstance(error, (ValueError, MissingDependencyError)) else UNKNOWN
