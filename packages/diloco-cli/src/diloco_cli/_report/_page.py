"""The page of a report as HTML: pure functions. Every text of others is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median
from string import Template
from typing import Any

from .._facts import Facts
from . import _pictures
from ._pictures import number, seconds
from ._summary import PARTS

_MOST_FAILURES, _MOST_PARTS = 20, 40
_OPEN = 16  # ranks: a longer table is folded
_LATEST = 253_402_300_799.0  # of all calendars
_EXPLAINED = (
    "Exposed exchange and wait are the time in which a replica did not train because of a sync. "
    "Where it trained beside a sync, it is the wait first that this has hidden."
)
_NOT_IN_IT = (
    "Requests and storage are not in it, and neither is the time of a replica before its first sign"
)


def page(summary: Facts) -> str:
    """Return the page, which needs neither a network nor a script."""
    files = Path(__file__).parent
    return Template((files / "page.html").read_text(encoding="utf-8")).substitute(
        name=escape(summary["run_id"] or "without a name"),
        style=(files / "style.css").read_text(encoding="utf-8"),
        head=_head(summary),
        telemetry=_telemetry(summary) if summary["incarnations"] else "",
        failures=_failures(summary),
        cost=_cost(summary["cost"]),
        missing="".join(f"<li>{escape(each)}</li>" for each in summary["missing"]),
    )


def moment(time: float | None) -> str:
    """Return a time as people read it."""
    if time is None:
        return "unknown"
    return f"{datetime.fromtimestamp(min(max(time, 0.0), _LATEST), UTC):%Y-%m-%d %H:%M:%S} UTC"


def _in_bytes(count: float) -> str:
    return f"{number(count)}B"


def _money(cost: float | None) -> str:
    return "unknown" if cost is None else f"{cost:,.2f} USD"


def _share(split: Mapping[str, float]) -> str:
    total = sum(split.values())
    return f"{split['compute'] / total:.1%}" if total else "unknown"


def _soft(lines: Iterable[str]) -> str:
    return f'<p class="soft">{"<br>".join(escape(line) for line in lines if line)}</p>'


def _head(summary: Facts) -> str:
    lives, first, last = summary["incarnations"], summary["first"], summary["last"]
    newest = {each["rank"]: each for each in lives}.values()
    losses = [value for each in newest for _, _, value in each["losses"][-1:] if value is not None]
    facts = {
        "ranks": str(summary["world_size"]),
        "outer steps": str(summary["sync"]),
        "first to last sign": "unknown" if first is None or last is None else seconds(last - first),
        f"last {summary['loss'] or 'loss'}, middle": number(median(losses))
        if losses
        else "unknown",
        "time spent training": _share(_pictures.time_split(lives)),
        "sent": _in_bytes(sum(each["bytes"]["sent"] for each in lives)),
        "received": _in_bytes(sum(each["bytes"]["received"] for each in lives)),
        "cost, as far as known": _money(summary["cost"]["known"]),
    }
    where = sorted({each["where"] for each in lives} - {""})
    hosts = sorted({each["host"] for each in lives} - {""})
    lines = [
        f"Store: {summary['uri']}" if summary["uri"] else "",
        f"Backend: {summary['backend']['name']}" if summary["backend"] else "",
        f"Ran on {', '.join(where[:10])}" if where else "",
        f"Hosts ({len(hosts)}): {', '.join(hosts[:4])}{', …' if len(hosts) > 4 else ''}",
        f"First sign {moment(first)}, last sign {moment(last)}",
        f"Made on {moment(summary['made_at'])} by diloco-cli {summary['made_by']}, "
        "from telemetry of version 1",
    ]
    tiles = [f"<div><dt>{escape(name)}<dd>{escape(text)}</div>" for name, text in facts.items()]
    return f"{_soft(lines)}<dl>{''.join(tiles)}</dl>"


def _telemetry(summary: Facts) -> str:
    ranks = _pictures.ranks_with_a_row(summary["incarnations"])
    every = len({each["rank"] for each in summary["incarnations"]})
    some = f"{len(ranks)} of {every} ranks have a row: those of note, and then the first ones."
    shown = sum(map(len, ranks.values()))
    newest = f"{shown} of {len(summary['incarnations'])} incarnations are shown, the newest ones."
    note = _soft([some] * (len(ranks) < every) + [newest] * (shown < len(summary["incarnations"])))
    loss = escape(summary["loss"] or "loss")
    syncs = "<p>No outer step was told of.</p>"
    if summary["syncs"]:
        syncs = _pictures.members_chart(summary, ranks)
    lives = _table(_HEADS, [_cells(each) for lives in ranks.values() for each in lives], "lives")
    return f"""<h2>Loss</h2>
<h3>{loss} against inner steps</h3>{_pictures.loss_chart(summary, by_time=False)}
<h3>{loss} against time</h3>{_pictures.loss_chart(summary, by_time=True)}
<h2>Where the time went</h2>{note}{_pictures.split_chart(ranks)}{_soft([_EXPLAINED])}
<h2>Incarnations</h2>{note}{_pictures.lives_chart(summary, ranks)}
<details{" open" * (len(ranks) <= _OPEN)}><summary>All of these in a table</summary>
{lives}</details>
<h2>Who was in which sync</h2>{note}{syncs}"""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str) -> str:
    """Return a table of texts; its class says how many columns at its left are not numbers."""
    lines = ["<th>".join(["", *map(escape, heads)])]
    lines += ["<td>".join(["", *map(escape, row)]) for row in rows]
    return f'<div class="wide"><table class={kind}><tr>{"<tr>".join(lines)}</table></div>'


_HEADS = (
    "rank", "no.", "attempt", "end", "host", "first sign", "took", "steps", "syncs", "loss",
    "training", "waited", "sent", "received",
)  # fmt: skip


def _cells(each: Facts) -> list[str]:
    loss = [point[2] for point in each["losses"][-1:]]
    return [
        *("" if each[name] is None else str(each[name]) for name in ("rank", "epoch", "attempt")),
        each["ended"] or "not told", each["host"], moment(each["first"]),
        seconds(each["last"] - each["first"]), number(each["step"]), str(each["syncs"]),
        "".join("not a number" if value is None else number(value) for value in loss),
        _share(each["seconds"]), seconds(each["seconds"]["wait"]),
        *map(_in_bytes, each["bytes"].values()),
    ]  # fmt: skip


def _failures(summary: Facts) -> str:
    """Return what failed, as the replicas themselves say, and their backend."""
    failures = [
        (each["rank"], f"said so at {moment(each['last'])}, on {each['host']}", each["last_lines"])
        for each in summary["incarnations"]
        if each["ended"] == "failed"
    ]
    for each, after in pairwise(summary["incarnations"]):
        if each["rank"] == after["rank"] and each["ended"] is None:
            text = f"incarnation {each['epoch']} ended without a word, as if it was killed"
            when = (
                f"its last line is of {moment(each['last'])}; a minute before the end may be lost"
            )
            failures.append((each["rank"], f"{text}, and {after['epoch']} came after it", [when]))
    for said in summary["backend"]["replicas"] if summary["backend"] else ():
        if said["state"] in {"failed", "cancelled", "unknown"}:
            text = f"{said['state']}, {said['reason'] or 'no reason'}: {said['message'] or ''}"
            failures.append((said["rank"], text, said["last_lines"]))
    parts = [
        f"<h3>Rank {rank}: {escape(text)}</h3><pre>{escape(chr(10).join(lines))}</pre>"
        for rank, text, lines in sorted(failures)[:_MOST_FAILURES]
    ]
    if len(failures) > _MOST_FAILURES:
        parts.append(f"<p>{len(failures) - _MOST_FAILURES} more are not shown.</p>")
    return "".join(parts) or "<p>No replica has failed, as far as they have told.</p>"


def _cost(cost: Mapping[str, Any]) -> str:
    rows = []
    for part in cost["parts"][:_MOST_PARTS]:
        price = "none" if part["price"] is None else f"{part['price']:g}"
        names = PARTS[part["part"]], part["name"] or "not told"
        rows.append((*names, number(part["amount"]), price, _money(part["cost"])))
    known = f"Known: {_money(cost['known'])}, by prices of {cost['date']}."
    if cost["known"] is None:
        known = "No price is known for any part: give your own (--prices)."
    table = _table(("part", "where", "amount", "price", "cost"), rows, "cost")
    return f"{table}{_soft([known, _NOT_IN_IT + '.'])}"
