"""What was to be shown, and whether it was: what is missed is printed too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from .rows import LINKS, ROWS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .results import Results
    from .rows import Row
    from .timing import Time

POINTS = 0.02
"""How far the share of time in training may be from the planner's."""
ENOUGH = 0.99
"""The share of time in training to be reached where the planner says that the link allows it."""
BYTES = 0.05
"""How far bytes may be from the planner's, as a share."""


@dataclass(frozen=True, slots=True)
class Goal:
    """One of them.

    Attributes:
        text: What was found, and what was to be found.
        met: Whether it was.
    """

    text: str
    met: bool


def change(row: Row, losses: Results) -> list[float]:
    """Return by which share the loss of a row is above that of the row that it is compared with.

    The list has one number for each seed; both rows were trained on the same batches.
    """
    if row.against is None:
        return []
    own, others = losses.found.get(row.name, {}), losses.found.get(row.against, {})
    return [own[seed] / others[seed] - 1 for seed in sorted(own.keys() & others.keys())]


def percent(change: float) -> str:
    """A change in percent, with its sign; one that is rounded to nothing has a plus."""
    return f"{round(change, 3) + 0.0:+.1%}"


def goals(losses: Results, times: Results) -> list[Goal]:
    """All of them, as far as something was measured."""
    return [*_of_losses(losses), *_of_times(times)]


def _of_losses(losses: Results) -> Iterator[Goal]:
    for row in ROWS:
        changes = change(row, losses)
        if changes and row.within is not None:
            other = next(each.label for each in ROWS if each.name == row.against)
            found = f"{row.label}: the loss is {percent(fmean(changes))} against {other}"
            text = f"{found}; goal: at most {row.within:+.0%}"
            yield Goal(text, fmean(changes) <= row.within)


def _of_times(times: Results) -> Iterator[Goal]:
    for row in ROWS:
        if row.fewer is None or row.against is None:
            continue
        time, against = times.time(row.name, "slow"), times.time(row.against, "slow")
        if time is not None and against is not None:
            times_fewer = _moved(against) / _moved(time)
            other = next(each.label for each in ROWS if each.name == row.against)
            text = f"{row.label} moves {times_fewer:.0f} times fewer bytes than {other}"
            yield Goal(f"{text}; goal: at least {row.fewer:.0f}", times_fewer >= row.fewer)
    for link in LINKS:
        found = [(row, time) for row in ROWS if (time := times.time(row.name, link)) is not None]
        for row, time in found:
            text = (
                f"{row.label} trains {time.utilisation:.1%} of the time ({link} link; planned: "
                f"{time.bound:.1%})"
            )
            if time.bound >= ENOUGH:
                yield Goal(f"{text}; goal: at least {ENOUGH:.0%}", time.utilisation >= ENOUGH)
            else:
                off = abs(time.utilisation - time.bound)
                yield Goal(f"{text}; goal: at most {100 * POINTS:g} points from it", off <= POINTS)
        if found:
            worst = max(_off(time) for _, time in found)
            text = f"bytes on the {link} link differ from the planner's by {worst:.1%} at most"
            yield Goal(f"{text}; goal: {BYTES:.0%}", worst <= BYTES)


def _moved(time: Time) -> float:
    return time.sent + time.received


def _off(time: Time) -> float:
    pairs = (time.sent, time.planned_sent), (time.received, time.planned_received)
    return max(abs(math.log(counted / planned)) for counted, planned in pairs)
