"""The incarnations of the ranks, put together from what they have told: pure functions.

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
* ``losses``: some of its losses: inner steps, time, value. The value is None where it is NaN,
  infinite or too large to draw.
* ``losses_wrong``: how many losses have no value.
* ``last_lines``: what it told last, if it has failed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median, median_low

from diloco_protocol.backend import redact_json
from diloco_protocol.telemetry import Live, Metric, SyncLine, Told

from .._facts import Facts
from .._texts import clean

LEAST_OFFSET = 60.0
"""Clocks that differ by fewer seconds count as equal."""
_LARGEST_LOSS = 1e30  # a larger one cannot be drawn, and neither can infinity
_POINTS, _LEAST_POINTS = 8000, 24  # of all incarnations together, and of each
_LAST_LINES, _LINE = 3, 300

Loss = tuple[int, float, float | None]
History = Mapping[tuple[int, int], Sequence[SyncLine]]


def history_of(told: Told) -> dict[tuple[int, int], list[SyncLine]]:
    """Return the lines of every incarnation, by rank and epoch; of equal numbers the last one."""
    lines: dict[tuple[int, int], dict[int, SyncLine]] = defaultdict(dict)
    for key, history in told.history.items():
        lines[key.rank, key.epoch].update({line.number: line for line in history.lines})
    return {life: [by[n] for n in sorted(by)] for life, by in lines.items() if by}


def incarnations_of(told: Told, history: History, world_size: int, loss: str) -> list[Facts]:
    """Return all incarnations, in the order of ranks."""
    lives = {(live.rank, live.epoch): live for live in told.live.values()}
    offsets = clock_offsets(history)
    keys = sorted(key for key in lives.keys() | history.keys() if key[0] < world_size)
    most = max(_LEAST_POINTS, _POINTS // max(1, len(keys)))
    return [
        _incarnation(key, lives.get(key), history.get(key, ()), offsets.get(key), loss, most)
        for key in keys
    ]


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
            offsets[life] = offset if abs(offset) >= LEAST_OFFSET else 0.0
    return offsets


def _incarnation(
    key: tuple[int, int],
    live: Live | None,
    lines: Sequence[SyncLine],
    offset: float | None,
    loss: str,
    most: int,
) -> Facts:
    records: list[Live | SyncLine] = [*([live] if live else []), *lines[::-1]]  # the newest first
    begun = [line.time - line.compute_seconds - line.exposed_seconds for line in lines[:1]]
    ahead = offset or 0.0
    losses = [
        (line.total_inner_steps, line.time - ahead, _drawable(line.metrics[loss]))
        for line in lines
        if loss in line.metrics
    ]
    waits, compute = sum(map(_exposed_wait, lines)), sum(line.compute_seconds for line in lines)
    ended = None if live is None or live.ended is None else clean(live.ended)
    lacking = lines[-1].number - len(lines) if lines else 0
    return {
        "rank": key[0],
        "epoch": key[1],
        "attempt": next((each.attempt for each in records if each.attempt is not None), None),
        "host": clean(next((each.host for each in records if each.host), "")),
        "where": clean(f"{live.backend}/{live.place}".replace("//", "/").strip("/"))
        if live
        else "",
        "first": max(0.0, min([each.time for each in records] + begun)) - ahead,
        "last": max(each.time for each in records) - ahead,
        "clock_offset": offset,
        "phase": str(live.phase) if live else "",
        "ended": ended,
        "syncs": len(lines),
        "lines_missing": lacking + (live.dropped if live else 0),
        "step": max([line.total_inner_steps for line in lines] + ([live.step] if live else [])),
        "seconds": {
            "compute": compute,
            "exchange": sum(map(_exposed, lines)) - waits,
            "wait": waits,
        },
        "bytes": {
            way: max(sum(getattr(line, name) for line in lines), getattr(live, name, 0))
            for way, name in (("sent", "bytes_sent"), ("received", "bytes_received"))
        },
        "losses": _thinned(losses, most),
        "losses_wrong": sum(value is None for _, _, value in losses),
        "last_lines": list(map(_told_line, lines[-_LAST_LINES:])) if ended == "failed" else [],
    }


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


def _told_line(line: SyncLine) -> str:
    metrics = redact_json(dict(line.metrics))
    shown = " ".join(f"{name}={value}" for name, value in metrics.items())
    return clean(
        f"sync {line.sync} at step {line.total_inner_steps}: contribution {line.contribution}, "
        f"{line.members} members, waited {line.wait_seconds:.3g} s. {shown}",
        _LINE,
    )
