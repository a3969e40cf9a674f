"""Following a log: when to look again, and when everything has been read.

A platform's own part is only a reader, which yields the lines that are new at each look.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ._backoff import Backoff
    from ._hooks import LogQuery

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Look:
    """The outcome of one look at a log.

    Attributes:
        fresh: Whether the log had anything new, selected or not.
        whole: Whether it was read to its end. If not, the next look follows at once.
    """

    fresh: bool
    whole: bool = True


@dataclass
class LogEnd:
    """Decides when a log is complete whose last lines may arrive after the replica's end.

    Args:
        looks: How many looks after the end, one after another, must find nothing new.
        seconds: For how long after the end nothing new must have been found.
    """

    looks: int = 0
    seconds: float = 0.0
    _quiet: int = 0
    _since: float | None = None

    def reached(self, look: Look, now: float) -> bool:
        """Return whether everything has been read, after a look that began after the end."""
        self._quiet = 0 if look.fresh else self._quiet + 1
        if look.fresh or self._since is None:
            self._since = now
        return self._quiet >= self.looks and now - self._since >= self.seconds

    def pause(self, delay: float, now: float) -> float:
        """Shorten the pause before the next look to the time that is left to wait."""
        left = 0.0 if self._since is None else self._since + self.seconds - now
        return min(delay, left) if left > 0 else delay


def follow(
    query: LogQuery,
    read: Callable[[bool], Generator[T, None, Look]],
    ended: Callable[[], bool],
    backoff: Backoff,
    clock: Callable[[], float],
    end: LogEnd | None = None,
) -> Iterator[T]:
    """Yield the lines of a log, look by look, as far as ``query.follow`` and ``query.until`` say.

    Without ``query.follow`` the log is read to its end once.

    Args:
        query: The selection of lines.
        read: Yields the selected lines that are new, over all attempts, oldest first. It is told
            whether the end was known before this look, so that an unfinished line will stay so.
        ended: Says whether the replica has ended; not called any more when it has.
        backoff: The pauses, which begin anew with the first of them when something new has come.
        clock: Returns the time in Unix seconds, by the clock that dates the log.
        end: Says when the log is complete; by default after one look.
    """
    end = end or LogEnd()
    over, delays = not query.follow, backoff.delays()
    while True:
        if not over:
            # Asked before reading: everything written before the end is then in the log.
            over = (query.until is not None and clock() >= query.until) or ended()
            delays = backoff.delays() if over else delays
        look = yield from read(over)
        if not look.whole:
            continue
        now = backoff.clock()
        if over and (end.reached(look, now) or not query.follow):
            return
        if look.fresh:
            delays = backoff.delays()
        pause = next(delays)
        backoff.sleep(end.pause(pause, now) if over else pause)
