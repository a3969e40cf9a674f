"""Converting the bytes of a pod's log to lines with their times."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from diloco_protocol import UnavailableError
from diloco_protocol.backend import redact_and_cut, split_lines

from .._client._errors import MissingError, NoLogError
from .._state._facts import parse_time

_SHOWN = 500
# Text that the kubelet sends in place of a log, with status 200; see pkg/kubelet/kuberuntime, and
# cri-client's logs.go. It does so for a log that is gone, and while it cannot query its runtime,
# such as when that restarts. The last form occurs only for a moment.
_NO_LOG = re.compile(
    r"unable to retrieve container logs for |failed to try resolving symlinks in path |"
    r"failed to (open|tail|seek|read) .*log file |(rpc error: code = )"
)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log.

    Attributes:
        stamp: Its time as the kubelet wrote it; empty if the kubelet wrote none.
        text: Its text without the line end.
    """

    stamp: str
    text: str

    @property
    def time(self) -> float | None:
        """Return the time of the line in Unix seconds."""
        return parse_time(self.stamp)


class Place:
    """The position up to which a log has been read.

    A new connection continues there when the old one broke. Neither clocks nor the order of time
    stamps are relied on. A new connection asks for the last lines, and continues behind those that
    are known. If they do not show where that is, the whole log is requested, and the part that was
    read is skipped.

    Args:
        known: Number of lines that are remembered.

    Attributes:
        lost: The last answer did not show where to continue, so the next one has to be whole.
        answered: The last answer had lines, known or new.
    """

    def __init__(self, known: int = 1000) -> None:
        self._known = known
        self._last: deque[int] = deque(maxlen=known)
        self._first = 0  # the key of the first line of the current file
        self._read = 0  # the number of lines read from that file
        self.lost = False
        self.answered = False

    @property
    def tail(self) -> int | None:
        """Return how many of the last lines the next answer must have; None for all."""
        return None if self.lost or self._read <= self._known else self._known

    def fresh(self, lines: Iterable[Line]) -> Iterator[Line]:
        """Yield the lines that were not read yet."""
        whole = self.tail is None
        self.lost = self.answered = False
        lines = iter(lines)
        for line in self._behind(lines, whole=whole) if self._read else lines:
            if not self._read:
                self._first = _key(line)
            self._read += 1
            self._last.append(_key(line))
            yield line

    def _behind(self, lines: Iterator[Line], *, whole: bool) -> Iterator[Line]:
        """Yield the lines behind those that were read."""
        if not whole:
            next(lines, None)  # the kubelet may begin in the middle of a line
        last, answer = list(self._last), list[Line]()
        places = list(range(len(last)))  # where in the remembered lines the answer may begin
        ends = []  # how many lines of the answer are known, for each possible beginning
        for line in lines:
            self.answered = True
            answer.append(line)
            if whole and len(answer) == 1 and _key(line) == self._first:
                yield from islice(lines, self._read - 1, None)
                return
            places = [place for place in places if last[place + len(answer) - 1] == _key(line)]
            if len(last) - len(answer) in places:
                places.remove(len(last) - len(answer))
                ends.append(len(answer))
            if not places:
                break
        if whole:  # the node has started a new file
            self._first, self._read = _key(answer[0]) if answer else 0, max(ends, default=0)
        elif len(ends) != 1:
            self.lost = True
            return
        yield from answer[max(ends, default=0) :]
        yield from lines


def lines_of(pieces: Iterable[bytes]) -> Iterator[Line]:
    """Return lines from pieces that may end anywhere; very long lines are cut."""
    return map(_line, split_lines(pieces))


def written(lines: Iterable[Line], is_gone: Callable[[], bool]) -> Iterator[Line]:
    """Yield the lines that have a time, as all lines of a replica have.

    Args:
        lines: The lines of the answer.
        is_gone: Asks the cluster whether the log is gone.

    Raises:
        MissingError: There are no lines, as the kubelet says, and the cluster confirms that they
            are gone.
        NoLogError: There are no lines, and the kubelet does not say whether they are gone.
        UnavailableError: There are no lines for the moment, or the text in their place is not the
            kubelet's.
    """
    message, any_written = "", False
    for line in lines:
        any_written = any_written or bool(line.stamp)
        if line.stamp:
            yield line
        else:
            message = message or line.text
    if message and not any_written:
        shown = redact_and_cut(message, _SHOWN)
        if no_log := _NO_LOG.match(message):
            if is_gone():
                raise MissingError(f"there is no log: {shown}")
            kind = UnavailableError if no_log[2] else NoLogError
            raise kind(f"the node cannot read the log now: {shown}")
        raise UnavailableError(f"the answer is not a log, so it is not the cluster's own: {shown}")


def _line(raw: bytes) -> Line:
    text = raw.decode(errors="replace")
    stamp, space, rest = text.partition(" ")
    # A line without text has a stamp and a space, or the stamp alone.
    return Line(stamp, rest) if (space or text) and _is_stamp(stamp) else Line("", text)


def _is_stamp(text: str) -> bool:
    return re.match(r"\d{4}-\d\d-\d\dT\S{9}", text) is not None and parse_time(text) is not None


def _key(line: Line) -> int:
    return hash((line.stamp, line.text))
