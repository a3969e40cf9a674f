"""The verb ``report``: reads what is known of a run, and writes a page of HTML about it.

Every text of others is escaped here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import chain, groupby, islice, zip_longest
from operator import itemgetter
from pathlib import Path
from statistics import median
from string import Template
from typing import Any, BinaryIO

from diloco_protocol import DilocoError, InvalidRequestError, ReplicaHandle
from diloco_protocol.backend import shown

from ..__about__ import __version__
from .._backends import Run
from .._facts import SUCCEEDED, Facts, place_of, replica_facts
from .._session import Session
from .._texts import clean, number
from .._told import NOTHING, Recorded, is_uri, open_run, read_run, store_of
from . import _pictures
from ._pictures import seconds
from ._summary import DEFAULT, MOST_BYTES, PARTS, read_prices, summarise

_LINES, _MOST_LOGS, _MOST_FAILURES, _MOST_PARTS = 20, 16, 20, 40
_BY_JOURNAL = "Where no backend has a record, the ends are those in the journal of the store."
_NOT_READ = "What the replicas tell was not read (--store URI can say where they meet): {}."
_OPEN = 16  # ranks: a longer table is folded
_LATEST = 253_402_300_799.0  # of all calendars


def report(
    session: Session,
    target: str,
    *,
    store: str | None,
    file: str | None,
    force: bool,
    prices: BinaryIO | None,
) -> int:
    """Make the report of a run, and return the exit code.

    Args:
        session: The backends, of which only that of a run by name is asked.
        target: Its name, or the URI of its store.
        store: Where the replicas of a run by name meet; None for what the backend says.
        file: Where the page goes. None: to a file of the run's name in the current folder, or
            nowhere if JSON is asked for.
        force: Whether a file that is there is replaced.
        prices: A price table; None for the one that comes with the command.

    Raises:
        InvalidRequestError: The file cannot be written, or the prices are not allowed.
    """
    if file is None and not session.as_json:
        file = f"{Path(target).name.strip('.') or 'run'}.html"
    if file is None and force:
        raise InvalidRequestError("--force replaces a page, and --json alone writes none: add -o")
    if file is not None and Path(file).exists() and not force:
        raise InvalidRequestError(f"{file} is there already: --force replaces it, -o names another")
    table = read_prices(DEFAULT.read_bytes() if prices is None else prices.read(MOST_BYTES + 1))
    run_id = "" if is_uri(target) else target
    if not run_id:
        session.ask_no_backend()
        if store is not None:
            raise InvalidRequestError(f"--store is for runs by name: {target} is that of a store")
    with contextlib.ExitStack() as opened:
        run = opened.enter_context(session.run(run_id)) if run_id else None
        uri, unread, telemetry, recorded = store if run else target, "", NOTHING, None
        try:
            place = store_of(run) if run and uri is None else open_run(uri or target)
            telemetry, recorded = read_run(place)
            uri = uri or place.uri
        except DilocoError as error:
            if uri is not None:
                raise
            unread = _NOT_READ.format(clean(str(error)))
        backend = _backend_facts(run, recorded)
    named = sorted({live.run for live in telemetry.live.values()})
    if store and named and run_id not in named:
        raise InvalidRequestError(f"--store {uri} is that of {shown(named)}, not of {run_id}")
    if recorded is not None and recorded.ends and not named:
        run_id = run_id or next(iter(recorded.ends)).run_id
    facts = summarise(telemetry, table, uri=uri, run_id=run_id, backend=backend)
    summary = {"made_at": time.time(), "made_by": __version__, **facts}
    if unread:
        summary["missing"].append(unread)
        session.screen.say(unread)
    if recorded is not None and recorded.ends:
        summary["missing"].append(_BY_JOURNAL)
    if file is not None:
        text = page(summary)
        try:
            with Path(file).open("w" if force else "x", encoding="utf-8") as out:
                out.write(text)
        except OSError as error:
            raise InvalidRequestError(f"{file} cannot be written: {error.strerror}") from None
    if session.as_json:
        session.screen.json(summary)
    elif file is not None:
        session.screen.line(clean(file))
    return SUCCEEDED


def _backend_facts(run: Run | None, recorded: Recorded | None) -> Facts | None:
    """Return what a backend says about a run, or else the journal in its store; None if neither."""
    ends = {} if recorded is None else recorded.ends
    if run is None and not ends:
        return None
    handles = run.handles if run else list(ends)
    seen = {**ends, **(run.executor.describe_run(handles) if run else {})}
    rows = [{**replica_facts(handle, seen.get(handle)), "last_lines": []} for handle in handles]
    failed = [n for n, facts in enumerate(rows) if facts["state"] == "failed"]
    for n in failed[:_MOST_LOGS]:
        lines = _log(run, recorded, handles[n]).splitlines()[-_LINES:]
        rows[n]["last_lines"] = list(map(clean, lines))
    return {
        "name": run.backend if run else clean(handles[0].backend_name),
        "place": place_of(handles),
        "world_size": handles[0].world_size,
        "replicas": rows,
    }


def _log(run: Run | None, recorded: Recorded | None, handle: ReplicaHandle) -> str:
    kept = (recorded and recorded.log(handle)) or ""
    try:
        return run.executor.stream_logs(handle, n_lines=_LINES) if run else kept
    except DilocoError as error:
        return kept or f"(its log cannot be read: {error})"


def page(summary: Facts) -> str:
    """Return the page, which needs neither a network nor a script."""
    return _filled(
        "page.html",
        name=escape(summary["run_id"] or "without a name"),
        style=_filled("style.css"),
        head=_head(summary),
        telemetry=_telemetry(summary) if summary["incarnations"] else "",
        failures=_failures(summary),
        cost=_rows(_cost(summary["cost"])),
        known=_money(summary["cost"]["known"]),
        date=summary["cost"]["date"],
        missing="".join(f"<li>{escape(note)}</li>" for note in summary["missing"]),
    )


def _filled(file: str, /, **parts: str) -> str:
    """Return a file of this folder, with parts in the places that it names."""
    return Template(Path(__file__).with_name(file).read_text(encoding="utf-8")).substitute(parts)


def moment(time: float) -> str:
    """Return a time as people read it."""
    return f"{datetime.fromtimestamp(min(max(time, 0.0), _LATEST), UTC):%Y-%m-%d %H:%M:%S} UTC"


def _money(cost: float | None) -> str:
    return "unknown" if cost is None else f"{cost:,.2f} USD"


def _share(split: Mapping[str, float]) -> str:
    total = sum(split.values())
    return f"{split['compute'] / total:.1%}" if total else "unknown"


def _soft(lines: Iterable[str]) -> str:
    return f'<p class="soft">{"<br>".join(escape(line) for line in lines if line)}</p>'


def _head(summary: Facts) -> str:
    lives, first, last = summary["incarnations"], summary["first"], summary["last"]
    newest = {life["rank"]: life for life in lives}.values()
    losses = [value for life in newest for _, _, value in life["losses"][-1:] if value is not None]
    middle = number(median(losses)) if losses else "unknown"
    facts = {
        "ranks": str(summary["world_size"]),
        "outer steps": str(summary["sync"]),
        "first to last sign": seconds(last - first) if lives else "unknown",
        f"last {summary['loss'] or 'loss'}, median": middle,
        "time spent training": _share(_pictures.time_split(lives)),
        **{way: f"{number(sum(x['bytes'][way] for x in lives))}B" for way in ("sent", "received")},
        "cost, as far as known": _money(summary["cost"]["known"]),
    }
    where = sorted({life["where"] for life in lives} - {""})
    lines = [
        f"Store: {summary['uri']}" if summary["uri"] else "",
        f"Backend: {summary['backend']['name']}" if summary["backend"] else "",
        f"Ran on {', '.join(where[:10])}" if where else "",
        ", ".join(f"{name} {value}" for name, value in summary["setup"].items()),
        f"First sign {moment(first)}, last sign {moment(last)}" if lives else "",
        f"Made on {moment(summary['made_at'])} by diloco-cli {summary['made_by']}",
    ]
    known = facts if lives else {"ranks": facts["ranks"]}
    tiles = [f"<div><dt>{escape(name)}<dd>{escape(text)}</div>" for name, text in known.items()]
    return f"{_soft(lines)}<dl>{''.join(tiles)}</dl>"


def _telemetry(summary: Facts) -> str:
    ranks = _pictures.ranks_with_a_row(summary["incarnations"])
    every = len({life["rank"] for life in summary["incarnations"]})
    shown, count = sum(map(len, ranks.values())), len(summary["incarnations"])
    rows = f"{len(ranks)} of {every} ranks have a row"
    some = f"{rows}, and {shown} of {count} incarnations are shown, the newest ones."
    return _filled(
        "telemetry.html",
        note=_soft([some] * (shown < count)),
        loss=escape(summary["loss"] or "loss"),
        by_steps=_pictures.loss_chart(summary, by_time=False),
        by_time=_pictures.loss_chart(summary, by_time=True),
        split=_pictures.split_chart(ranks),
        lives=_pictures.lives_chart(summary, ranks),
        open="open" * (len(ranks) <= _OPEN),
        table=_rows(_cells(life) for lives in ranks.values() for life in lives),
        members=_pictures.members_chart(summary, ranks),
    )


def _rows(rows: Iterable[Sequence[str]]) -> str:
    """Return the rows of a table of texts."""
    return "<tr>".join("<td>".join(["", *map(escape, row)]) for row in rows)


def _cells(life: Facts) -> list[str]:
    loss = [point[2] for point in life["losses"][-1:]]
    return [
        *("" if life[name] is None else str(life[name]) for name in ("rank", "epoch", "attempt")),
        life["ended"] or "not told", life["host"], moment(life["first"]),
        seconds(life["last"] - life["first"]), number(life["step"]), str(life["syncs"]),
        "".join("not a number" if value is None else number(value) for value in loss),
        _share(life["seconds"]), seconds(life["seconds"]["wait"]),
        *(f"{number(count)}B" for count in life["bytes"].values()),
    ]  # fmt: skip


def _failures(summary: Facts) -> str:
    """Return what failed, as the replicas themselves say, and their backend.

    Where there is too much, the newest failure of every rank comes first.
    """
    lives = {(life["rank"], life["epoch"]): life for life in summary["incarnations"]}
    failures = [
        (*key, f"said so at {moment(life['last'])}, on {life['host']}", life["last_lines"])
        for key, life in lives.items()
        if life["ended"] == "failed"
    ]
    word = "word that was read" if summary["left_out"] else "word, as if killed"
    for rank, epoch in lives:
        before = lives.get((rank, epoch - 1))
        if epoch > 1 and (before is None or before["ended"] is None):
            text = f"incarnation {epoch - 1} ended without a {word}, and {epoch} began"
            when = f"its last line is of {moment(before['last'])}" if before else "it left no line"
            failures.append((rank, epoch - 1, text, [f"{when}; up to a minute of it may be lost"]))
    for row in summary["backend"]["replicas"] if summary["backend"] else ():
        if row["state"] in {"failed", "cancelled", "unknown"}:
            text = f"{row['state']}, {row['reason'] or 'no reason'}: {row['message'] or ''}"
            failures.append((row["rank"], float("inf"), text, row["last_lines"]))
    of_ranks = [list(each)[::-1] for _, each in groupby(sorted(failures), itemgetter(0))]
    newest_first = filter(None, chain.from_iterable(zip_longest(*of_ranks)))
    parts = [
        f"<h3>Rank {rank}: {escape(text)}</h3><pre>{escape(chr(10).join(lines))}</pre>"
        for rank, _, text, lines in sorted(islice(newest_first, _MOST_FAILURES))
    ]
    if len(failures) > _MOST_FAILURES:
        parts.append(f"<p>{len(failures) - _MOST_FAILURES} more are not shown.</p>")
    return "".join(parts) or "<p>No failure is known.</p>"


def _cost(cost: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    for part in cost["parts"][:_MOST_PARTS]:
        price = "none" if part["price"] is None else f"{part['price']:g}"
        names = PARTS[part["part"]], part["name"] or "not told"
        yield *names, number(part["amount"]), price, _money(part["cost"])
