"""Following a log: its lines, when to look again, and when everything has been read.

A platform's own part is only a reader, which yields the lines that are new at each look. Any
program may have written the log, and a line without an end must not fill the launcher's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
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


LINE_BYTES = 1 << 20
"""Number of bytes that are kept of one line of a log."""
CUT = b" [... the line was cut here, after 1 MiB ...]"
"""The mark at the end of a line that was longer."""


class LineSplitter:
    """Splits pieces of a log, which may end anywhere, into lines. Not thread-safe.

    Only a newline ends a line, since progress bars write carriage returns. The first
    :data:`LINE_BYTES` of a line are kept, followed by :data:`CUT` if the line is longer; the rest
    of it is skipped. Time is linear in the bytes, and memory is bounded by one line and one piece.

    Attributes:
        position: Where the last line that was returned ends: the number of bytes fed up to there,
            including its newline.
    """

    def __init__(self) -> None:
        self.position = 0
        self._fed = 0  # by the pieces before the current one
        self._begun: list[bytes] = []  # joined once, since a line may come in thousands of pieces
        self._held = 0
        self._cut = False

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the lines that a piece completes, without their ends.

        The iterator must be exhausted before the next piece is fed.
        """
        start = 0
        while (end := piece.find(b"\n", start)) >= 0:
            self._keep(piece, start, end)
            self.position = self._fed + end + 1
            yield self._take()
            start = end + 1
        self._keep(piece, start, len(piece))
        self._fed += len(piece)

    def rest(self) -> bytes | None:
        """Return the beginning of a line whose end has not come; None if there is none.

        The next piece starts a new line.
        """
        if not self._held:
            return None
        self.position = self._fed
        return self._take()

    def _keep(self, piece: bytes, start: int, end: int) -> None:
        room = LINE_BYTES - self._held
        if end - start > room:
            end, self._cut = start + room, True
        if end > start:
            self._begun.append(piece[start:end])
            self._held += end - start

    def _take(self) -> bytes:
        line = b"".join([*self._begun, CUT] if self._cut else self._begun)
        self._begun, self._held, self._cut = [], 0, False
        return line


def split_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a log that ends with the last piece, as :class:`LineSplitter` does."""
    splitter = LineSplitter()
    for piece in pieces:
        yield from splitter.feed(piece)
    if (rest := splitter.rest()) is not None:
        yield rest
