"""The facts about runs as JSON values, and the rows that people see: pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from diloco_protocol import ReplicaHandle, ReplicaStatus
from diloco_protocol.backend import redact, redact_json
from diloco_protocol.telemetry import Live, Metric

from ._table import Cell, Column, Facts
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
_STATUS = (
    "state", "reason", "stopping", "attempt", "exit_code", "signal", "message", "started_at",
    "finished_at", "url", "native",
)  # fmt: skip
_RESULT = 200  # characters of a result that people see


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
    facts = dict.fromkeys(_STATUS)
    if status is None:
        facts |= {"state": "unknown", "stopping": False, "native": ""}
        facts["message"] = "there is no record of it"
    else:
        facts = {name: getattr(status, name) for name in _STATUS}
    return {"rank": handle.rank, **plain(facts)}


def result_facts(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about one entry of what ``collect`` returns; lost replicas are unknown."""
    names = ("reason", "attempt", "exit_code", "signal", "error")
    state = "unknown" if result["reason"] == "lost" else result["status"]
    facts = plain({"state": state, **{name: result[name] for name in names}})
    return {"rank": result["rank"], **facts, "result": redact_json(result["result"])}


def plain(facts: Facts) -> dict[str, Any]:
    """Return facts with texts that are safe to print."""
    return {
        name: clean(str(value)) if isinstance(value, str) else value
        for name, value in facts.items()
    }


def counts(states: Iterable[str | None]) -> dict[str, int]:
    """Return how many replicas are in each state, in the order of a replica's life."""
    found = Counter(states)
    return {state: found[state] for state in STYLES if found[state]}


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
    started = facts.get("started_at")
    return "" if started is None else duration((facts.get("finished_at") or now) - started)


def _state(facts: Facts, _: float) -> Cell:
    state = facts["state"]
    words = f"{state}, stopping" if facts.get("stopping") else state
    return Cell(words, STYLES.get(state, ""))


REPLICA_COLUMNS = (
    Column("RANK", right=True),
    Column("STATE", _state),
    Column("REASON", dropped=2),
    Column("ATTEMPT", dropped=4, right=True),
    Column("EXIT", lambda facts, _: facts["signal"] or facts["exit_code"], dropped=3),
    Column("STARTED", ago, dropped=6),
    Column("TOOK", _took, dropped=5),
)


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


def _run_state(facts: Facts, _: float) -> Cell:
    states = facts["states"]
    only = next(iter(states)) if len(states) == 1 else ""
    return Cell(counts_in_words(states) or "unknown", STYLES.get(only, ""))


def _replicas(facts: Facts, _: float) -> str:
    count, whole = facts["replicas"], facts["world_size"]
    return str(count) if count == whole else f"{count} of {whole}"


RUN_COLUMNS = (
    Column("RUN", lambda facts, _: facts["run_id"]),
    Column("STATE", _run_state),
    Column("BACKEND", dropped=2),
    Column("REPLICAS", _replicas, dropped=4, right=True),
    Column("STARTED", ago, dropped=3),
)


def shown_value(value: Metric) -> str:
    """Return the value of a metric as people see it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
