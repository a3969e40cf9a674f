"""The facts about runs as JSON values, and the rows that people see: pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from diloco_protocol import ReplicaHandle, ReplicaStatus
from diloco_protocol.backend import redact, redact_json
from diloco_protocol.telemetry import Live, Metric

from ._table import Cell, Column
from ._texts import clean, duration, in_ranges

VERSION = 1
"""The version of what ``--json`` prints."""
STYLES = {
    "pending": "yellow",
    "running": "cyan",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "magenta",
    "unknown": "red",
}
ENDS = {"left": "succeeded", "failed": "failed"}
"""The states that the words of replicas on their end mean."""
NAMES = tuple(each.name for each in fields(Live) if each.name not in {"run", "world_size"})
"""What is told of a rank."""
_RESULT = 200  # characters of a result that people see

REPLICA_COLUMNS = (
    Column("RANK", right=True),
    Column("STATE"),
    Column("REASON", dropped=2),
    Column("ATTEMPT", dropped=4, right=True),
    Column("EXIT", dropped=3),
    Column("STARTED", dropped=6),
    Column("TOOK", dropped=5),
)
RUN_COLUMNS = (
    Column("RUN"),
    Column("STATE"),
    Column("BACKEND", dropped=2),
    Column("REPLICAS", dropped=4, right=True),
    Column("STARTED", dropped=3),
)


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
    status_facts: dict[str, Any] = {
        "state": "unknown",
        "reason": None,
        "stopping": False,
        "attempt": None,
        "exit_code": None,
        "signal": None,
        "message": "there is no record of it",
        "started_at": None,
        "finished_at": None,
        "url": None,
        "native": "",
    }
    if status is not None:
        status_facts = {name: getattr(status, name) for name in status_facts}
    return {"rank": handle.rank, **{name: _plain(value) for name, value in status_facts.items()}}


def result_facts(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about one entry of what ``collect`` returns; lost replicas are unknown."""
    state = "unknown" if result["reason"] == "lost" else result["status"]
    names = ("reason", "attempt", "exit_code", "signal", "error")
    return {
        "rank": result["rank"],
        "state": _plain(state),
        **{name: _plain(result[name]) for name in names},
        "result": redact_json(result["result"]),
    }


def _plain(value: Any) -> Any:
    return clean(str(value)) if isinstance(value, str) else value


def counts(replicas: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many replicas are in each state, in the order of a replica's life."""
    found = Counter(facts["state"] for facts in replicas)
    return {state: found[state] for state in STYLES if found[state]}


def counts_in_words(states: Mapping[str, int]) -> str:
    """Return numbers of replicas as people read them.

    >>> counts_in_words({"running": 3, "failed": 1})
    '3 running, 1 failed'
    """
    return ", ".join(f"{count} {state}" for state, count in states.items())


def replica_row(facts: Mapping[str, Any], now: float) -> list[Cell]:
    """Return the cells of :data:`REPLICA_COLUMNS` for one replica."""
    state, started = facts["state"], facts.get("started_at")
    ended = facts.get("finished_at")
    signal, code = facts["signal"], facts["exit_code"]
    return [
        Cell(str(facts["rank"])),
        Cell(f"{state}, stopping" if facts.get("stopping") else state, STYLES.get(state, "")),
        Cell(facts["reason"] or ""),
        Cell("" if facts["attempt"] is None else str(facts["attempt"])),
        Cell(signal or ("" if code is None else str(code))),
        Cell("" if started is None else f"{duration(now - started)} ago"),
        Cell("" if started is None else duration((ended or now) - started)),
    ]


def replica_lines(replicas: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what is said about replicas, for the lines below the table; each text stands once."""
    ranks_by_text: dict[str, list[int]] = {}
    for facts in replicas:
        texts = [facts.get("message") or facts.get("error") or ""]
        if facts.get("result") is not None:
            texts.append(f"result {clean(str(facts['result']), _RESULT)}")
        for text in filter(None, texts):
            ranks_by_text.setdefault(text, []).append(facts["rank"])
    return [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {in_ranges(ranks)}: {text}"
        for text, ranks in ranks_by_text.items()
    ]


def run_row(facts: Mapping[str, Any], now: float) -> list[Cell]:
    """Return the cells of :data:`RUN_COLUMNS` for one run."""
    states, started = facts["states"], facts["started_at"]
    only = next(iter(states)) if len(states) == 1 else ""
    count, whole = facts["replicas"], facts["world_size"]
    return [
        Cell(facts["run_id"]),
        Cell(counts_in_words(states) or "unknown", STYLES.get(only, "")),
        Cell(facts["backend"]),
        Cell(str(count) if count == whole else f"{count} of {whole}"),
        Cell("" if started is None else f"{duration(now - started)} ago"),
    ]


def shown_value(value: Metric) -> str:
    """Return the value of a metric as people see it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
