"""The facts of a report, from the records of a run and a price table: pure functions.

An incarnation is one life of a rank, as a JSON value. Its times are by the clock of its machine,
less ``clock_offset``. These are its names:

* ``rank``, ``host`` and ``attempt`` (of the launch) are as the replica tells them.
* ``epoch``: which incarnation of the rank it is, from 1.
* ``where``: its backend and place, as far as they are known, such as ``"eks/training"``.
* ``first``: when it gave its first sign; the training that its first line covers counts as one.
* ``last``: when it gave its last sign.
* ``clock_offset``: how many seconds its clock is ahead of the others, by the syncs that they
  share; 0 below a minute, None if there is no such sync.
* ``phase``: what it did last; empty if that is not known.
* ``ended``: how it has ended, ``"left"`` or ``"failed"``; None if it has not told that.
* ``syncs``: how many syncs it has told of.
* ``lines_missing``: how many lines of its history are missing.
* ``step``: inner steps of the rank at the end.
* ``seconds``: seconds of training (``compute``), and those in which it did not train because of an
  ``exchange``, or because of its ``wait`` for others.
* ``bytes``: bytes that its syncs have ``sent`` and ``received``.
* ``requests``: how many its process has sent to the store that write or list (``writes``), and
  that read (``reads``); empty in a folder, or if that is not known.
* ``losses``: some of its losses: inner steps, time, value. The value is None where it is NaN,
  infinite or too large to draw.
* ``losses_wrong``: how many losses have no value.
* ``last_lines``: what it told last, if it has failed.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median, median_low
from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import shown
from diloco_protocol.telemetry import Live, Metric, SyncLine, Told

from .._facts import Facts, loss_name
from .._texts import CLOCK, clean, clocks_in_words, ranks_in_words
from .._told import run_facts, unread
from .._view import sync_in_words

_LARGEST_LOSS = 1e30  # a larger one cannot be drawn, and neither can infinity
_POINTS, _LEAST_POINTS = 8000, 24  # of all incarnations together, and of each
_LAST_LINES = 3

Loss = tuple[int, float, float | None]
History = Mapping[tuple[int, int], Sequence[SyncLine]]
MOST_BYTES = 1 << 20
"""The largest price table."""
PARTS = {
    "replica_hour": "hours of replicas",
    "sent_gb": "GB sent into the store",
    "received_gb": "GB received from the store",
    "writes_1000": "thousands of requests that write or list",
    "reads_1000": "thousands of requests that read",
}
"""The parts of the cost, and what each is measured in."""
_HIGHEST = 1e9
Prices = Mapping[str, Any]
"""The day on which prices were true (``date``), and by part a price in US dollars by name: of a
backend and place, or of the kind of store. ``"*"`` is for all others."""
# It has what stores list for data that comes in. Nothing else follows from what replicas tell: not
# which machine one has, and not whether it is in the region of its store.
DEFAULT = Path(__file__).with_name("prices.json")


def history_of(told: Told) -> dict[tuple[int, int], list[SyncLine]]:
    """Return the lines of every incarnation, by rank and epoch; of equal numbers the last one."""
    lines: dict[tuple[int, int], dict[int, SyncLine]] = defaultdict(dict)
    for key, history in told.history.items():
        lines[key.rank, key.epoch].update({line.number: line for line in history.lines})
    return {life: [by[n] for n in sorted(by)] for life, by in lines.items() if by}


def incarnations_of(told: Told, history: History, world_size: int, loss: str) -> Iterable[Facts]:
    """Yield all incarnations, in the order of ranks."""
    lives = {(live.rank, live.epoch): live for live in (*told.live.values(), *told.ends.values())}
    offsets = clock_offsets(history)
    keys = sorted(key for key in lives.keys() | history.keys() if key[0] < world_size)
    most = max(_LEAST_POINTS, _POINTS // max(1, len(keys)))
    for key in keys:
        live, lines = lives.get(key), history.get(key, ())
        signs: list[Live | SyncLine] = [*([live] if live else []), *lines[::-1]]  # newest first
        begun = [line.time - line.compute_seconds - line.exposed_seconds for line in lines[:1]]
        ahead = offsets.get(key) or 0.0
        losses = [
            (line.total_inner_steps, line.time - ahead, _drawable(line.metrics[loss]))
            for line in lines
            if loss in line.metrics
        ]
        waits = sum(map(_exposed_wait, lines))
        lacking = lines[-1].number - len(lines) if lines else 0
        ended = clean(live.ended) if live and live.ended is not None else None
        yield {
            "rank": key[0],
            "epoch": key[1],
            "attempt": next((sign.attempt for sign in signs if sign.attempt is not None), None),
            "host": clean(next((sign.host for sign in signs if sign.host), "")),
            "where": clean("/".join(filter(None, (live.backend, live.place) if live else ()))),
            "first": max(0.0, min([sign.time for sign in signs] + begun)) - ahead,
            "last": max(sign.time for sign in signs) - ahead,
            "clock_offset": offsets.get(key),
            "phase": str(live.phase) if live else "",
            "ended": ended,
            "syncs": len(lines),
            "lines_missing": lacking + (live.dropped if live else 0),
            "step": max([line.total_inner_steps for line in lines] + ([live.step] if live else [])),
            "seconds": {
                "compute": sum(line.compute_seconds for line in lines),
                "exchange": sum(map(_exposed, lines)) - waits,
                "wait": waits,
            },
            "bytes": {
                way: max(sum(getattr(line, name) for line in lines), getattr(live, name, 0))
                for way, name in (("sent", "bytes_sent"), ("received", "bytes_received"))
            },
            "requests": {
                w: n for w in ("writes", "reads") if (n := getattr(live, w, None)) is not None
            },
            "losses": _thinned(losses, most),
            "losses_wrong": sum(value is None for _, _, value in losses),
            "last_lines": [sync_in_words(line, world_size) for line in lines[-_LAST_LINES:]]
            + [clean(live.error)] * bool(live.error)
            if live and ended == "failed"
            else [],
        }


def clock_offsets(history: History) -> dict[tuple[int, int], float]:
    """Return how far the clock of each incarnation is ahead, where it shares a sync with others."""
    times: dict[int, dict[int, float]] = defaultdict(dict)
    for (rank, _), lines in history.items():
        for line in lines:
            if line.committed:
                times[line.sync][rank] = line.time
    shared = {sync: median_low(by.values()) for sync, by in times.items() if len(by) > 1}
    offsets = {}
    for life, lines in history.items():
        of_both = (line for line in lines if line.committed and line.sync in shared)
        if ahead := [line.time - shared[line.sync] for line in of_both]:
            offset = median(ahead)
            offsets[life] = offset if abs(offset) >= CLOCK else 0.0
    return offsets


def _drawable(value: Metric) -> float | None:
    number = math.nan if isinstance(value, str) else float(value)
    return number if abs(number) <= _LARGEST_LOSS else None


def _thinned(points: Sequence[Loss], most: int) -> list[Loss]:
    """Return so many points, or one more: the first one without a value is among them."""
    last = len(points) - 1
    if last < most:
        return list(points)
    wrong = [n for n, point in enumerate(points) if point[2] is None][:1]
    chosen = {round(n * last / (most - 1)) for n in range(most)}
    return [points[n] for n in sorted(chosen.union(wrong))]


def _exposed(line: SyncLine) -> float:
    """Return the seconds that a sync took from the training; all of them without an inner loop."""
    if line.compute_seconds or line.hidden_seconds or line.exposed_seconds:
        return line.exposed_seconds
    return line.exchange_seconds + line.wait_seconds


def _exposed_wait(line: SyncLine) -> float:
    """Return how much of that was waiting. Training beside a sync hides the waiting first."""
    return min(_exposed(line), max(0.0, line.wait_seconds - line.hidden_seconds))


def summarise(
    told: Told, prices: Prices, *, uri: str | None, run_id: str = "", backend: Facts | None = None
) -> dict[str, Any]:
    """Return what a report says about a run, as a JSON value.

    Args:
        told: What its replicas have told.
        prices: The prices.
        uri: Where the replicas meet, if that was given.
        run_id: Name of the run, if that was given.
        backend: What the backend says, if it was asked.
    """
    facts = run_facts(uri or "", told)
    world_size = facts["world_size"] or (backend["world_size"] if backend else 0)
    history = history_of(told)
    loss = loss_name(name for lines in history.values() for line in lines for name in line.metrics)
    incarnations = list(incarnations_of(told, history, world_size, loss))
    facts["silent"] = sorted(set(range(world_size)) - {life["rank"] for life in incarnations})
    facts["states"] = {row["rank"]: row["state"] for row in (backend or {}).get("replicas", ())}
    syncs = list(_syncs(history, incarnations))
    return {
        "run_id": run_id or facts["run_id"],
        "uri": None if uri is None else facts["uri"],
        "world_size": world_size,
        **_signs(incarnations),
        "sync": max([facts["sync"], *(sync["sync"] for sync in syncs)]),
        "loss": clean(loss) or None,
        "setup": next((row["setup"] for row in facts["replicas"] if row["setup"]), {}),
        "incarnations": incarnations,
        "syncs": syncs,
        "backend": backend,
        "cost": cost_of(incarnations, uri and facts["uri"], prices),
        **{name: facts[name] for name in ("silent", "left_out")},
        "missing": list(_missing(told, facts, incarnations)) if uri else [],
    }


def _signs(incarnations: Sequence[Facts]) -> dict[str, float | None]:
    """Return when the first and the last sign came, by clocks that can be compared if there are."""
    chosen = [life for life in incarnations if life["clock_offset"] is not None] or incarnations
    first = min((life["first"] for life in chosen), default=None)
    return {"first": first, "last": max((life["last"] for life in chosen), default=None)}


def _syncs(history: History, incarnations: Iterable[Facts]) -> Iterable[dict[str, Any]]:
    """Yield the outer steps of the run.

    ``counted`` are the ranks that say that they are in it, and ``later`` those whose contribution
    was carried on, or that did not wait for the end.
    """
    lines = defaultdict(list)
    for life in incarnations:
        for line in history.get((life["rank"], life["epoch"]), ()):
            if line.committed:
                time = line.time - (life["clock_offset"] or 0.0)
                lines[line.sync].append((time, life["rank"], line))
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


def _missing(told: Told, facts: Facts, incarnations: Sequence[Facts]) -> Iterable[str]:
    """Say what is missing or odd."""
    low, high = _signs(incarnations).values()
    newest = {life["rank"]: life for life in incarnations}
    odd: dict[str, set[int]] = {"nothing was told": set(facts["silent"])}
    for life in incarnations:
        is_last = life is newest[life["rank"]]
        denied = life["ended"] == "failed" and facts["states"].get(life["rank"]) == "succeeded"
        off = life["last"] < (low or 0.0) or life["first"] > (high or 0.0)
        for text, applies in (
            ("the end of the last incarnation is not known", is_last and life["ended"] is None),
            ("the end of an earlier incarnation is not known", not (is_last or life["ended"])),
            ("it calls itself failed, and is recorded as succeeded", is_last and denied),
            ("lines of the history are missing", life["lines_missing"] > 0),
            ("losses are NaN, infinite or too large to draw", life["losses_wrong"] > 0),
            ("the clock cannot be compared, and is outside of the time shown here", off),
        ):
            odd.setdefault(text, set()).update([life["rank"]] * applies)
    for text, ranks in odd.items():
        if ranks:
            yield f"{ranks_in_words(ranks).capitalize():.300}: {text}."
    if off := {life["rank"]: life["clock_offset"] for life in incarnations if life["clock_offset"]}:
        yield f"Clocks that were off, by common syncs, and are corrected: {clocks_in_words(off)}."
    yield from (f"{text.capitalize()}." for text in unread(facts))
    if torn := sum(part.skipped + part.of_another_version for part in told.history.values()):
        yield f"Lines that are torn, or not of a history: {torn}."


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
    if not isinstance(table, dict) or not set(table) <= set(allowed) or table.get("version") != 1:
        raise _refused("it", f"an object of version 1 with {', '.join(allowed)}", table)
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", str(table.get("date")), re.ASCII):
        raise _refused("date", "a day such as 2026-11-01", table.get("date"))
    prices = {part: table.get(part, {}) for part in PARTS}
    for part, by_name in prices.items():
        if not isinstance(by_name, dict):
            raise _refused(part, "an object with a price by name", by_name)
        for name, price in by_name.items():
            if type(price) not in {int, float} or not 0 <= price <= _HIGHEST:
                raise _refused(f"{part} of {shown(name)}", f"from 0 to {_HIGHEST:g}", price)
    return {"date": table["date"], **prices}


def _refused(name: str, must: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"--prices: {name} must be {must}, not {shown(value)}")


def cost_of(incarnations: Sequence[Facts], uri: str | None, prices: Prices) -> dict[str, Any]:
    """Return what is known of the cost by part, as a JSON value in US dollars."""
    amounts: dict[tuple[str, str], float] = defaultdict(float)
    scheme = uri.partition("://")[0] if uri and "://" in uri else "file"
    for life in incarnations:
        amounts["replica_hour", life["where"]] += (life["last"] - life["first"]) / 3600
        amounts["sent_gb", scheme] += life["bytes"]["sent"] / 1e9
        amounts["received_gb", scheme] += life["bytes"]["received"] / 1e9
        for way, number in life["requests"].items():
            amounts[f"{way}_1000", scheme] += number / 1000
    parts: list[dict[str, Any]] = []
    for (part, name), amount in sorted(amounts.items()):
        names = (name, name.partition("/")[0], "*")
        price = next((float(prices[part][key]) for key in names if key in prices[part]), None)
        cost = None if price is None else price * amount
        parts.append({"part": part, "name": name, "amount": amount, "price": price, "cost": cost})
    known = [part["cost"] for part in parts if part["cost"] is not None]
    return {"date": prices["date"], "known": sum(known) if known else None, "parts": parts}
