"""The facts of a report, from the records of a run: pure functions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import Any

from diloco_protocol.telemetry import Told

from .._facts import VERSION
from .._texts import clean, duration, in_ranges
from ._prices import Prices, cost_of
from ._replicas import History, Incarnation, history_of, incarnations_of, loss_name

_MOST_CLOCKS = 10


@dataclass(frozen=True)
class Sync:
    """An outer step of the run.

    Attributes:
        sync: Its number.
        time: When most replicas were done with it.
        members: How many replicas are in it, as they say.
        counted: The ranks that say that they are in it.
        later: The ranks whose contribution was carried on, or that did not wait for the end.
    """

    sync: int
    time: float
    members: int
    counted: tuple[int, ...]
    later: tuple[int, ...]


@dataclass(frozen=True)
class Summary:
    """What a report says.

    Attributes:
        made_at: When the report was made, in Unix seconds.
        made_by: The version of diloco-cli that has made it.
        run_id: Name of the run.
        uri: Where its replicas meet; None if that was not given.
        world_size: Number of ranks.
        first: The first sign of a replica, in Unix seconds; None without one. ``last`` likewise.
        last: The last sign.
        sync: Outer steps of the run's model.
        loss: The metric that is shown as loss; None if none was logged.
        incarnations: What the ranks have told.
        syncs: The outer steps that were told of.
        backend: What the backend says: its name, its place and its replicas; None if it was not
            asked.
        cost: What is known of the cost.
        silent: Ranks that have told nothing.
        missing: What the report lacks, and what is odd, in sentences.
    """

    made_at: float
    made_by: str
    run_id: str
    uri: str | None
    world_size: int
    first: float | None
    last: float | None
    sync: int
    loss: str | None
    incarnations: tuple[Incarnation, ...]
    syncs: tuple[Sync, ...]
    backend: Mapping[str, Any] | None
    cost: Mapping[str, Any]
    silent: tuple[int, ...]
    missing: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the facts as a JSON value."""
        return {"version": VERSION, **asdict(self)}


def summarise(
    told: Told,
    prices: Prices,
    *,
    uri: str | None,
    now: float,
    made_by: str,
    run_id: str = "",
    backend: Mapping[str, Any] | None = None,
) -> Summary:
    """Return what a report says about a run.

    Args:
        told: What its replicas have told.
        prices: The prices.
        uri: Where the replicas meet, if that was given.
        now: The time in Unix seconds.
        made_by: The version of diloco-cli.
        run_id: Name of the run, if that was given.
        backend: What the backend says, if it was asked.
    """
    lives = told.live.values()
    sizes = Counter(live.world_size for live in lives).most_common(1)
    world_size = sizes[0][0] if sizes else backend["world_size"] if backend else 0
    names = Counter(live.run for live in lives).most_common(1)
    history = history_of(told)
    loss = loss_name(history)
    incarnations = incarnations_of(told, history, world_size, loss)
    first, last = span(incarnations)
    silent = tuple(sorted(set(range(world_size)) - {each.rank for each in incarnations}))
    uri = None if uri is None else clean(uri)
    syncs = tuple(_syncs(history, incarnations))
    missing = _missing(told, incarnations, silent, loss) if uri else _NOTHING_READ
    return Summary(
        made_at=now,
        made_by=made_by,
        run_id=run_id or (clean(names[0][0]) if names else ""),
        uri=uri,
        world_size=world_size,
        first=first,
        last=last,
        sync=max([live.sync for live in lives] + [each.sync for each in syncs], default=0),
        loss=None if loss is None else clean(loss),
        incarnations=incarnations,
        syncs=syncs,
        backend=backend,
        cost=cost_of(incarnations, uri, prices),
        silent=silent,
        missing=tuple(missing),
    )


def span(incarnations: Sequence[Incarnation]) -> tuple[float | None, float | None]:
    """Return the first and the last sign; clocks that can be compared with others come first."""
    chosen = [each for each in incarnations if each.clock_offset is not None] or incarnations
    first = min((each.first for each in chosen), default=None)
    return first, max((each.last for each in chosen), default=None)


def _syncs(history: History, incarnations: Iterable[Incarnation]) -> Iterable[Sync]:
    lines = defaultdict(list)
    for each in incarnations:
        for line in history.get((each.rank, each.epoch), ()):
            if line.committed:
                lines[line.sync].append((line.time - (each.clock_offset or 0.0), each.rank, line))
    for sync, members in sorted(lines.items()):
        counted = {rank for _, rank, line in members if line.contribution == "counted"}
        later = {rank for _, rank, line in members if line.contribution in {"carried", "open"}}
        yield Sync(
            sync=sync,
            time=median_low(time for time, _, _ in members),
            members=max(line.members for _, _, line in members),
            counted=tuple(sorted(counted)),
            later=tuple(sorted(later - counted)),
        )


_NOTHING_READ = (
    "What the replicas tell was not read: a backend does not say where they meet. Give their store "
    "(--store).",
)


def _missing(
    told: Told, incarnations: Sequence[Incarnation], silent: Sequence[int], loss: str | None
) -> Iterable[str]:
    """Say what is missing or odd."""
    low, high = span(incarnations)
    newest = {each.rank: each for each in incarnations}
    lives = Counter(each.rank for each in incarnations)
    checks: dict[str, Callable[[Incarnation], bool]] = {
        "the end of the last incarnation was not told": lambda each: (
            each.ended is None and each is newest[each.rank]
        ),
        "the end of an earlier incarnation was not told": lambda each: (
            each.ended is None and each is not newest[each.rank]
        ),
        "earlier incarnations have left nothing to read": lambda each: (
            each is newest[each.rank] and each.epoch > lives[each.rank]
        ),
        "lines of the history are missing": lambda each: each.lines_missing > 0,
        "losses are NaN, infinite or too large to draw": lambda each: each.losses_wrong > 0,
        "the clock cannot be compared, and is outside of the time shown here": lambda each: (
            each.last < (low or 0.0) or each.first > (high or 0.0)
        ),
    }
    if silent:
        yield f"{_ranks(silent)}: nothing was told."
    for text, applies in checks.items():
        if ranks := {each.rank for each in incarnations if applies(each)}:
            yield f"{_ranks(ranks)}: {text}."
    moved = [each for each in incarnations if each.clock_offset]
    for each in moved[:_MOST_CLOCKS]:
        offset = each.clock_offset or 0.0
        yield (
            f"The clock of rank {each.rank}, incarnation {each.epoch}, is {duration(abs(offset))} "
            f"{'ahead of' if offset > 0 else 'behind'} the others, by the syncs that they share. "
            "Its times are corrected here."
        )
    histories = told.history.values()
    lines_of_others = sum(each.of_another_version for each in histories)
    for text, count in (
        ("More clocks that were corrected likewise", len(moved[_MOST_CLOCKS:])),
        ("Objects that are not what a replica tells", told.skipped),
        ("Lines that are torn, or not of a history", sum(each.skipped for each in histories)),
        ("Objects and lines of another version", told.of_another_version + lines_of_others),
        ("Objects that were not read, since there are too many", told.left_out),
    ):
        if count:
            yield f"{text}: {count}."
    if loss is None:
        yield "No metric with “loss” in its name was logged, or there is no history yet."
    yield "Replicas do not tell how many requests they send: `diloco plan` estimates them."
    yield "They tell neither their settings nor the versions of their programs."


def _ranks(ranks: Collection[int]) -> str:
    return f"{'Rank' if len(ranks) == 1 else 'Ranks'} {in_ranges(ranks):.300}"
