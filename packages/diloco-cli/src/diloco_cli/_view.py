"""Compute what ``watch`` shows of a run, and what has changed since: pure functions."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from diloco_protocol import ReplicaStatus
from diloco_protocol.backend import redact_json
from diloco_protocol.telemetry import Metric, SyncLine

from . import _facts
from ._facts import Cell, Column, Facts, table
from ._texts import CLOCK, clean, clocks_in_words, duration, in_ranges, number

BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
TOTAL_STEPS, DOLLARS = "total_steps", "dollars"
"""The metrics that are shown by what their names mean."""
_FINAL = frozenset({"succeeded", "failed", "cancelled"})
_KIND = ("state", "reason", "phase", "ended", "past")
_MIXED = {"state": "several", "phase": "several", **dict.fromkeys(("reason", "ended", "past"))}
_FEW = 8  # ranks of one kind that may be shown one by one
_RANKS = 20  # characters of a list of ranks
_RECENT = 50  # syncs whose pace is shown
_MOST_BLOCKS, _LEAST_ROWS = 60, 3


@dataclass(frozen=True)
class Seen:
    """The last message of a rank, as a watch has seen it.

    Attributes:
        said: What the rank has told last.
        since: When that was first seen, by the clock of this machine.
        after: When this watch looked before that, so that it was written in between; None if this
            was seen at its first look.
        base: What the same incarnation had told when it was first seen.
    """

    said: Facts
    since: float
    after: float | None
    base: Facts


class Word(NamedTuple):
    """The word of a backend on a rank.

    Attributes:
        status: The status of its replica; None if the backend has no record of one.
        silent_since: When the backend fell silent; None if it answers.
    """

    status: ReplicaStatus | None
    silent_since: float | None = None


def see(
    before: Mapping[int, Seen], told: Sequence[Facts], now: float, after: float | None
) -> dict[int, Seen]:
    """Return what has been seen after another look; ``after`` is when the look before was."""
    seen = dict(before)
    for facts in told:
        old = seen.get(facts["rank"])
        if old is None or old.said != facts:
            base = old.base if old is not None and old.said["epoch"] == facts["epoch"] else facts
            seen[facts["rank"]] = Seen(facts, now, after, base)
    return seen


def rank_facts(
    rank: int, seen: Seen | None, word: Word | None, looked: float, quiet: float
) -> dict[str, Any]:
    """Return the facts about one rank. What is not known is None.

    Args:
        rank: The rank.
        seen: What it has told.
        word: What a backend says; None if none was asked.
        looked: When the store has answered last, by the clock of this machine.
        quiet: Seconds without a sign after which a rank counts as silent.
    """
    facts = dict.fromkeys(_facts.NAMES) if seen is None else seen.said
    status = word.status if word else None
    state = None if facts["ended"] is None else _facts.ENDS.get(facts["ended"], "unknown")
    state = status.state.value if status else state or ("unknown" if word else None)
    is_silent = seen is not None and facts["ended"] is None and looked - seen.since > quiet
    silent_since = seen.since if seen and is_silent and state not in _FINAL else None
    is_newer = status is not None and status.attempt > (facts["attempt"] or status.attempt)
    return {
        **facts,
        "rank": rank,
        "state": state,
        "reason": status.reason.value if status and status.reason else None,
        "attempt": status.attempt if status else facts["attempt"],
        "error": clean(status.message) if status and state in _FINAL else facts["error"],
        "past": bool(silent_since or is_newer or state == "pending" or state in _FINAL),
        "bytes_per_sync": _bytes_per_sync(seen) if seen else None,
        "seen_at": None if seen is None or seen.after is None else seen.since,
        "clock_off": _clock_off(seen) if seen else None,
        "silent_since": silent_since,
        "state_since": word.silent_since if word else None,
    }


def _bytes_per_sync(seen: Seen) -> float | None:
    passed = {name: seen.said[name] - seen.base[name] for name in ("bytes_sent", "bytes_received")}
    syncs = seen.said["sync"] - seen.base["sync"]
    return sum(passed.values()) / syncs if syncs > 0 and sum(passed.values()) > 0 else None


def _clock_off(seen: Seen) -> float | None:
    """Return how far a clock is ahead at least, or behind if negative; None if it may be right."""
    if seen.after is None:
        return None
    off = max(seen.said["time"] - seen.since, 0.0) + min(seen.said["time"] - seen.after, 0.0)
    return off if abs(off) > CLOCK else None


def is_over(facts: Facts) -> bool:
    """Return whether a rank has ended, as far as is known."""
    if facts["state"] != "unknown":
        return facts["state"] in _FINAL
    return facts["time"] is None or facts["ended"] is not None or facts["silent_since"] is not None


@dataclass(frozen=True)
class View:
    """A run at one moment.

    Attributes:
        name: The run, as it was given.
        rows: The facts about each rank.
        syncs: Syncs of one rank in their order, each with its incarnation.
        syncs_of: That rank; None if none has told anything.
        notes: What is wrong with the sources.
        now: The time by the clock of this machine.
    """

    name: str
    rows: Sequence[Facts]
    syncs: Sequence[tuple[int, SyncLine]] = ()
    syncs_of: int | None = None
    notes: Sequence[str] = ()
    now: float = 0.0

    @property
    def is_over(self) -> bool:
        """True if all ranks have ended."""
        return bool(self.rows) and all(map(is_over, self.rows))

    @property
    def counts(self) -> dict[str, int]:
        """The number of ranks in each state."""
        return _facts.counts(row["state"] for row in self.rows)


def choose_rank(rows: Sequence[Facts], before: int | None) -> int | None:
    """Return the rank whose syncs are shown: the same one as before, as long as it goes on."""
    telling = {row["rank"]: row for row in rows if row["time"] is not None}
    going = [rank for rank, row in telling.items() if not (row["silent_since"] or is_over(row))]
    if before in telling and (before in going or not going):
        return before
    return max(going or telling, key=lambda rank: (telling[rank]["sync"], -rank), default=None)


def screenful(view: View, columns: int, height: int, blocks: str = BLOCKS) -> list[list[Cell]]:
    """Return the lines that a terminal of this size shows."""
    silent = sum(row["silent_since"] is not None for row in view.rows)
    parts = [_facts.counts_in_words(view.counts), f"{silent} silent" * bool(silent)]
    known = ", ".join(filter(None, parts))
    count = f"{len(view.rows)} replicas" if view.rows else "no replica has told anything yet"
    head = f"{view.name}: {count}" + f" ({known})" * bool(known)
    above = textwrap.wrap(head, columns)
    below = [line for text in foot(view) for line in textwrap.wrap(text, columns)]
    below += loss_line(view, columns, blocks)
    rows = fold(view.rows, max(_LEAST_ROWS, height - len(above) - len(below) - 2))
    return [
        *([Cell(text, "bold")] for text in above),
        *table(COLUMNS, rows, view.now, columns),
        *([Cell(text)] for text in below),
    ]


def _phase(facts: Facts, now: float) -> Cell:
    if facts["time"] is None or facts["state"] == "cancelled":  # then it may call itself failed
        return Cell("" if facts["state"] else "has told nothing")
    if facts["silent_since"]:
        return Cell(f"silent {duration(now - facts['silent_since'])}, was {facts['phase']}", "red")
    if facts["ended"] or facts["past"]:
        return Cell(facts["ended"] or f"was {facts['phase']}")
    if not (facts["phase"] == "waiting" and facts["missing"]):
        return Cell(facts["phase"])
    ranks = in_ranges(facts["waits_for"])
    is_short = len(ranks) <= _RANKS and len(facts["waits_for"]) == facts["missing"]
    return Cell(f"waiting for {ranks if is_short else str(facts['missing']) + ' ranks'}")


def _last_sign(facts: Facts, now: float) -> str:
    if facts["time"] is None:
        return ""
    age = now - (facts["time"] if facts["seen_at"] is None else facts["seen_at"])
    words = f"{duration(abs(age))} {'ago' if age >= 0 else 'ahead'}"
    return words + " by its clock" * (facts["seen_at"] is None)


def _of(name: str, show: Callable[[Any], str]) -> Callable[[Facts, float], str]:
    """Return a cell of a fact, which is empty if that is not known."""
    return lambda facts, _: "" if facts[name] is None else show(facts[name])


def _loss(metrics: Mapping[str, Metric]) -> str:
    return clean(_facts.shown_value(metrics.get(_facts.loss_name(metrics), "")), 16)


def _place(facts: Facts, _: float) -> str:
    return " ".join(filter(None, (facts["place"], facts["host"]))) or facts["backend"] or ""


COLUMNS = (
    Column("RANK", right=True),
    Column("STATE", _facts.state_cell, dropped=1),
    Column("REASON", dropped=6),
    Column("ATTEMPT", dropped=9, right=True),
    Column("SYNC", dropped=3, right=True),
    Column("PHASE", _phase, dropped=2),
    Column("LOSS", _of("metrics", _loss), dropped=4, right=True),
    Column("STEPS/S", _of("seconds_per_step", lambda step: number(1 / step)), 7, right=True),
    Column("TRAINS", _of("training_share", "{:.0%}".format), dropped=8, right=True),
    Column("MB/SYNC", _of("bytes_per_sync", lambda sent: number(sent / 1e6)), 10, right=True),
    Column("LAST SIGN", _last_sign, dropped=5),
    Column("PLACE", _place, dropped=11),
)


def fold(rows: Sequence[Facts], room: int) -> list[Facts]:
    """Return at most so many rows: ranks that do the same become one row, and odd ones stay.

    A row of several ranks has the numbers of the rank in the middle, and the oldest sign.
    """
    if len(rows) <= room:
        return list(rows)
    last = max(row["sync"] or 0 for row in rows)
    kinds: dict[tuple[Any, ...], list[Facts]] = {}
    for row in rows:
        is_behind = row["sync"] is not None and row["sync"] < last - 1
        kind = (*(row[name] for name in _KIND), row["silent_since"] is None, is_behind)
        kinds.setdefault(kind, []).append(row)
    groups = sorted(kinds.values(), key=len)
    if len(groups) > room:
        groups[room - 1 :] = [[row for group in groups[room - 1 :] for row in group]]
    spare = room - len(groups)
    shown: list[tuple[int, Facts]] = []
    for group in groups:
        if len(group) <= min(_FEW, spare + 1):
            spare -= len(group) - 1
            shown += [(row["rank"], row) for row in group]
        else:
            shown.append((min(row["rank"] for row in group), _merged(group)))
    return [row for _, row in sorted(shown, key=lambda pair: pair[0])]


def _merged(group: Sequence[Facts]) -> Facts:
    ranks = in_ranges(row["rank"] for row in group)
    middle = sorted(group, key=lambda row: row["step"] or 0)[len(group) // 2]
    places = ("place", "host", "backend")
    differs = {name for name in places if any(row[name] != middle[name] for row in group)}
    kinds = {(*(row[name] for name in _KIND), row["silent_since"] is None) for row in group}
    signs = [row["seen_at"] for row in group if row["seen_at"] is not None]
    return {
        **middle,
        **dict.fromkeys(differs, "…"),
        **(_MIXED if len(kinds) > 1 else {}),
        "rank": ranks if len(ranks) <= _RANKS else f"{len(group)} ranks",
        "silent_since": None if len(kinds) > 1 else middle["silent_since"],
        "seen_at": min(signs) if len(signs) == len(group) else None,
    }


def foot(view: View) -> list[str]:
    """Return the sentences below the table; what is not known is left out."""
    telling = [row for row in view.rows if row["time"] is not None]
    pace = syncs_per_hour(view.syncs)
    left = [_seconds_left(row) for row in telling if not is_over(row)]
    known = [seconds for seconds in left if seconds is not None]
    dollars = [_number(row, DOLLARS) for row in telling]
    spent = [amount for amount in dollars if amount is not None]
    off = {row["rank"]: row["clock_off"] for row in telling if row["clock_off"] is not None}
    # The history is written once a minute, or not at all where all wait.
    since = view.now - view.syncs[-1][1].time + off.get(view.syncs_of, 0.0) if view.syncs else 0.0
    parts = [
        f"sync {max(row['sync'] for row in telling)}" if telling else "",
        "" if pace is None else f"{number(pace)} per hour as of {duration(since)} ago",
        f"quorum {view.syncs[-1][1].members} of {len(view.rows)}" if view.syncs else "",
        f"{duration(max(known))} left" if known and len(known) == len(left) else "",
        f"${sum(spent):.2f} so far" if spent and len(spent) == len(dollars) else "",
    ]
    clocks = f"clocks that differ from the one here: {clocks_in_words(off)}" if off else ""
    ends = _facts.said(filter(is_over, view.rows))[:_FEW]
    return list(filter(None, [", ".join(filter(None, parts)), clocks, *ends, *view.notes]))


def _number(row: Facts, metric: str) -> float | None:
    value = row["metrics"].get(metric)
    return float(value) if isinstance(value, (int, float)) else None


def _seconds_left(row: Facts) -> float | None:
    total, step, share = _number(row, TOTAL_STEPS), row["seconds_per_step"], row["training_share"]
    known = total is not None and step is not None and share
    return max(0.0, (total or 0.0) - row["step"]) * step / share if known else None


def syncs_per_hour(syncs: Sequence[tuple[int, SyncLine]]) -> float | None:
    """Return the pace of the newest syncs of the newest incarnation, by its clock alone."""
    newest = [line for epoch, line in syncs if epoch == syncs[-1][0]][-_RECENT:]
    seconds = newest[-1].time - newest[0].time if newest else 0.0
    count = newest[-1].sync - newest[0].sync if newest else 0
    return 3600 * count / seconds if seconds > 0 and count > 0 else None


def loss_line(view: View, columns: int, blocks: str = BLOCKS) -> list[str]:
    """Return the loss of one rank at its syncs as a line of blocks, if there is any."""
    metrics = [line.metrics for _, line in view.syncs]
    name = _facts.loss_name(key for sample in metrics for key in sample)
    numbers = [float(each[name]) for each in metrics if not isinstance(each.get(name, ""), str)]
    if not numbers:
        return []
    # The history is written once a minute, so it may be behind the table.
    head = f"{clean(name, 16)} of rank {view.syncs_of} up to sync {view.syncs[-1][1].sync} "
    tail = f" {numbers[-1]:.4g}"
    room = max(1, min(_MOST_BLOCKS, columns - len(head) - len(tail)))
    return [f"{head}{sparkline(numbers, room, blocks)}{tail}"]


def sparkline(values: Sequence[float], room: int, blocks: str = BLOCKS) -> str:
    """Return numbers as a line of at most so many blocks; where there are more, their means.

    >>> sparkline([4, 3, 2, 1, 1], 8), sparkline([4, 4, 1, 1], 2)
    ('█▆▃▁▁', '█▁')
    """
    count = min(room, len(values))
    edges = [round(number * len(values) / count) for number in range(count + 1)]
    means = [math.fsum(value / (b - a) for value in values[a:b]) for a, b in pairwise(edges)]
    low, scale = min(means), max(means) / 2 - min(means) / 2  # which may be beyond all floats
    places = [(mean / 2 - low / 2) / scale if scale > 0 else 0.0 for mean in means]
    return "".join(blocks[round(place * (len(blocks) - 1))] for place in places)


def changes(before: View | None, view: View) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield what has changed, for programs and in words; a change of detail has no words.

    Of the syncs before the first view, there is only the last one.
    """
    for epoch, line in _new_syncs(before, view):
        facts = {"rank": view.syncs_of, "epoch": epoch, **redact_json(asdict(line))}
        yield {"change": "sync", **facts}, sync_in_words(line, len(view.rows))
    old = {row["rank"]: row for row in before.rows} if before else {}
    for row in view.rows:
        was = old.get(row["rank"])
        if row != was and (was or row["state"] or row["time"] is not None):
            yield {"change": "replica", **row}, _row_in_words(was, row, view.now)
    for note in view.notes:
        if before is None or note not in before.notes:
            yield {"change": "note", "text": note}, note
    if view.is_over:
        words = f"{view.name}: {_facts.counts_in_words(view.counts)}"
        yield {"change": "end", "run": view.name, "states": view.counts}, words


def _new_syncs(before: View | None, view: View) -> Sequence[tuple[int, SyncLine]]:
    if before is None or not before.syncs:
        return view.syncs[-1:] if before is None else view.syncs
    epoch, last = before.syncs[-1]
    if before.syncs_of != view.syncs_of:
        return [pair for pair in view.syncs if pair[1].sync > last.sync]
    return [pair for pair in view.syncs if (pair[0], pair[1].number) > (epoch, last.number)]


def _row_in_words(was: Facts | None, row: Facts, now: float) -> str:
    names = ("state", "reason", "attempt", "epoch", "silent_since", "state_since")
    if was and all(was[name] == row[name] for name in names):
        return ""
    attempt = f"attempt {row['attempt']}" if row["attempt"] else ""
    parts = (_facts.state_cell(row, now).text, row["reason"], _phase(row, now).text, attempt)
    words = ", ".join(dict.fromkeys(filter(None, parts)))  # its state and last word may be the same
    return f"rank {row['rank']}: {words}" + f": {row['error']}" * bool(row["error"])


def sync_in_words(line: SyncLine, world_size: int) -> str:
    """Return a sync as one line for people."""
    name = _facts.loss_name(line.metrics)
    parts = [
        f"sync {line.sync}: {line.members} of {world_size}",
        "" if line.committed else "not adopted",
        clean(f"{name} {_facts.shown_value(line.metrics[name])}" if name else "", 80),
        f"{number(line.bytes_sent + line.bytes_received)}B sent and received",
        f"waited {line.wait_seconds:.3g} s",
    ]
    return ", ".join(filter(None, parts))
