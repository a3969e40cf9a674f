"""The facts of a report, from the records of a run and a price table: pure functions."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import shown
from diloco_protocol.telemetry import Told

from .._facts import Facts, loss_name
from .._texts import clean, duration, ranks_in_words
from .._told import run_facts
from ._replicas import History, history_of, incarnations_of

_MOST_CLOCKS = 10
MOST_BYTES = 1 << 20
"""The largest price table."""
PARTS = {
    "replica_hour": "hours of replicas",
    "sent_gb": "GB sent into the store",
    "received_gb": "GB received from the store",
}
"""The parts of the cost, and what each is measured in."""
_HIGHEST = 1e9
Prices = Mapping[str, Any]
"""The day on which prices were true (``date``), and by part a price in US dollars by name: of a
backend and place, or of the kind of store. ``"*"`` is for all others."""
# It has what stores list for data that comes in. Nothing else follows from what replicas tell: not
# which machine one has, and not whether it is in the region of its store.
DEFAULT = Path(__file__).with_name("prices.json")


def summarise(
    told: Told,
    prices: Prices,
    *,
    uri: str | None,
    now: float,
    made_by: str,
    run_id: str = "",
    backend: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what a report says about a run, as a JSON value but for the incarnations.

    Args:
        told: What its replicas have told.
        prices: The prices.
        uri: Where the replicas meet, if that was given.
        now: The time in Unix seconds.
        made_by: The version of diloco-cli.
        run_id: Name of the run, if that was given.
        backend: What the backend says, if it was asked.
    """
    facts = run_facts(uri or "", told)
    world_size = facts["world_size"] or (backend["world_size"] if backend else 0)
    history = history_of(told)
    loss = loss_name(name for lines in history.values() for line in lines for name in line.metrics)
    incarnations = incarnations_of(told, history, world_size, loss)
    first, last = span(incarnations)
    silent = sorted(set(range(world_size)) - {each["rank"] for each in incarnations})
    syncs = list(_syncs(history, incarnations))
    return {
        "made_at": now,
        "made_by": made_by,
        "run_id": run_id or facts["run_id"],
        "uri": None if uri is None else facts["uri"],
        "world_size": world_size,
        "first": first,
        "last": last,
        "sync": max([facts["sync"], *(each["sync"] for each in syncs)]),
        "loss": clean(loss) or None,
        "incarnations": incarnations,
        "syncs": syncs,
        "backend": backend,
        "cost": cost_of(incarnations, uri and facts["uri"], prices),
        "silent": silent,
        "missing": list(_missing(told, incarnations, silent, loss)) if uri else [_NOTHING_READ],
    }


def span(incarnations: Sequence[Facts]) -> tuple[float | None, float | None]:
    """Return the first and the last sign; clocks that can be compared with others come first."""
    chosen = [each for each in incarnations if each["clock_offset"] is not None] or incarnations
    first = min((each["first"] for each in chosen), default=None)
    return first, max((each["last"] for each in chosen), default=None)


def _syncs(history: History, incarnations: Iterable[Facts]) -> Iterable[dict[str, Any]]:
    """Yield the outer steps of the run.

    ``counted`` are the ranks that say that they are in it, and ``later`` those whose contribution
    was carried on, or that did not wait for the end.
    """
    lines = defaultdict(list)
    for each in incarnations:
        for line in history.get((each["rank"], each["epoch"]), ()):
            if line.committed:
                lines[line.sync].append(
                    (line.time - (each["clock_offset"] or 0.0), each["rank"], line)
                )
    for sync, members in sorted(lines.items()):
        counted = {rank for _, rank, line in members if line.contribution == "counted"}
        later = {rank for _, rank, line in members if line.contribution in {"carried", "open"}}
        yield {
            "sync": sync,
            "time": median_low(time for time, _, _ in members),
            "members": max(line.members for _, _, line in members),
            "counted": sorted(counted),
            "later": sorted(later - counted),
        }


_NOTHING_READ = (
    "What the replicas tell was not read: a backend does not say where they meet. Give their store "
    "(--store)."
)


def _missing(
    told: Told, incarnations: Sequence[Facts], silent: Sequence[int], loss: str
) -> Iterable[str]:
    """Say what is missing or odd."""
    low, high = span(incarnations)
    newest = {each["rank"]: each for each in incarnations}
    lives = Counter(each["rank"] for each in incarnations)
    odd: dict[str, set[int]] = {"nothing was told": set(silent)}
    for each in incarnations:
        is_last = each is newest[each["rank"]]
        has_gap = is_last and each["epoch"] > lives[each["rank"]]
        off = each["last"] < (low or 0.0) or each["first"] > (high or 0.0)
        for text, applies in (
            ("the end of the last incarnation was not told", is_last and each["ended"] is None),
            ("the end of an earlier incarnation was not told", not (is_last or each["ended"])),
            ("earlier incarnations have left nothing to read", has_gap),
            ("lines of the history are missing", each["lines_missing"] > 0),
            ("losses are NaN, infinite or too large to draw", each["losses_wrong"] > 0),
            ("the clock cannot be compared, and is outside of the time shown here", off),
        ):
            odd.setdefault(text, set()).update([each["rank"]] * applies)
    for text, ranks in odd.items():
        if ranks:
            yield f"{ranks_in_words(ranks).capitalize():.300}: {text}."
    moved = [each for each in incarnations if each["clock_offset"]]
    for each in moved[:_MOST_CLOCKS]:
        offset = each["clock_offset"]
        yield (
            f"The clock of rank {each['rank']}, incarnation {each['epoch']}, is "
            f"{duration(abs(offset))} {'ahead of' if offset > 0 else 'behind'} the others, by the "
            "syncs that they share. Its times are corrected here."
        )
    histories = told.history.values()
    others = told.of_another_version + sum(each.of_another_version for each in histories)
    for text, count in (
        ("More clocks that were corrected likewise", len(moved[_MOST_CLOCKS:])),
        ("Objects that are not what a replica tells", told.skipped),
        ("Lines that are torn, or not of a history", sum(each.skipped for each in histories)),
        ("Objects and lines of another version", others),
        ("Objects that were not read, since there are too many", told.left_out),
    ):
        if count:
            yield f"{text}: {count}."
    if not loss:
        yield "No metric with “loss” in its name was logged, or there is no history yet."
    yield "Replicas do not tell how many requests they send: `diloco plan` estimates them."
    yield "They tell neither their settings nor the versions of their programs."


def read_prices(data: bytes) -> Prices:
    """Return the prices that a table in JSON holds.

    Raises:
        InvalidRequestError: It is not such a table; the error says what is wrong.
    """
    if len(data) > MOST_BYTES:
        raise InvalidRequestError(f"--prices: it is larger than {MOST_BYTES} bytes")
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"--prices: it is not JSON: {error}") from None
    allowed = ["version", "date", *PARTS]
    if not isinstance(table, dict) or not set(table) <= set(allowed):
        raise _refused("it", f"an object with {', '.join(allowed)}", table)
    if table.get("version") != 1:
        raise _refused("version", "1", table.get("version"))
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", str(table.get("date")), re.ASCII):
        raise _refused("date", "a day such as 2026-11-01", table.get("date"))
    prices = {part: table.get(part, {}) for part in PARTS}
    for part, by_name in prices.items():
        if not isinstance(by_name, dict):
            raise _refused(part, "an object with a price by name", by_name)
        for name, price in by_name.items():
            if type(price) not in {int, float} or not 0 <= price <= _HIGHEST:
                limits = f"a number from 0 to {_HIGHEST:g}"
                raise _refused(f"{part} of {shown(name)}", limits, price)
    return {"date": table["date"], **prices}


def _refused(name: str, must: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"--prices: {name} must be {must}, not {shown(value)}")


def cost_of(incarnations: Sequence[Facts], uri: str | None, prices: Prices) -> dict[str, Any]:
    """Return what is known of the cost by part, as a JSON value in US dollars."""
    amounts: dict[tuple[str, str], float] = defaultdict(float)
    scheme = uri.partition("://")[0] if uri and "://" in uri else "file"
    for each in incarnations:
        amounts["replica_hour", each["where"]] += (each["last"] - each["first"]) / 3600
        amounts["sent_gb", scheme] += each["bytes"]["sent"] / 1e9
        amounts["received_gb", scheme] += each["bytes"]["received"] / 1e9
    parts: list[dict[str, Any]] = []
    total: float | None = None
    for (part, name), amount in sorted(amounts.items()):
        known = prices[part]
        names = (name, name.partition("/")[0], "*")
        price = next((float(known[each]) for each in names if each in known), None)
        cost = None if price is None else price * amount
        total = total if cost is None else (total or 0.0) + cost
        parts.append({"part": part, "name": name, "amount": amount, "price": price, "cost": cost})
    return {"date": prices["date"], "known": total, "parts": parts}
