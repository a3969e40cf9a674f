"""The bytes of a pod's log as lines with their times."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from diloco_protocol import UnavailableError
from diloco_protocol.backend import redact_and_cut, split_lines

from ._errors import MissingError, NoLogError
from ._facts import parse_time

_SHOWN = 500
# What the kubelet says in place of a log, with status 200; pkg/kubelet/kuberuntime, and
# cri-client's logs.go. It says so of one that is gone, and while it cannot ask its runtime, as when
# that starts anew; the last only for a moment.
_NO_LOG = re.compile(
    r"unable to retrieve container logs for |failed to try resolving symlinks in path |"
    r"failed to (open|tail|seek|read) .*log file |(rpc error: code = )"
)


@dataclass(frozen=True, slots=True)
class Line:
    """One line: its time as the kubelet wrote it (empty if it did not), and its text without the line end."""

    stamp: str
    text: str

    @property
    def time(self) -> float | None:
        """Unix seconds."""
        return parse_time(self.stamp)


class Place:
    """How far a log has been read, so that a new connection continues where the old one broke.

    Neither clocks nor the order of time stamps are relied on. A new connection asks for the last
    lines, and goes on behind those that are known. If they do not show where that is, the whole log
    is asked for, and what was read is passed over.

    Args:
        known: How many lines are remembered.

    Attributes:
        lost: The last answer did not show where to go on, so the next one has to be whole.
        answered: The last answer had lines, which may be known.
    """

    def __init__(self, known: int = 1000) -> None:
        self._known = known
        self._last: deque[int] = deque(maxlen=known)
        self._first = 0  # of the file that is read
        self._read = 0  # lines of that file
        self.lost = False
        self.answered = False

    @property
    def tail(self) -> int | None:
        """How many of the last lines the next answer has to have; None for all."""
        return None if self.lost or self._read <= self._known else self._known

    def fresh(self, lines: Iterable[Line]) -> Iterator[Line]:
        """The lines that were not read yet."""
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
        """What is behind the lines that were read."""
        if not whole:
            next(lines, None)  # the kubelet may begin within a line
        last, held = list(self._last), list[Line]()
        places = list(range(len(last)))  # where the answer may begin in what is remembered
        ends = []  # how many of its lines are then known
        for line in lines:
            self.answered = True
            held.append(line)
            if whole and len(held) == 1 and _key(line) == self._first:
                yield from islice(lines, self._read - 1, None)
                return
            places = [place for place in places if last[place + len(held) - 1] == _key(line)]
            if len(last) - len(held) in places:
                places.remove(len(last) - len(held))
                ends.append(len(held))
            if not places:
                break
        if whole:  # the node has begun a new file
            self._first, self._read = _key(held[0]) if held else 0, max(ends, default=0)
        elif len(ends) != 1:
            self.lost = True
            return
        yield from held[max(ends, default=0) :]
        yield from lines


def lines_of(pieces: Iterable[bytes]) -> Iterator[Line]:
    """Lines from pieces that end anywhere; very long ones are cut."""
    return map(_line, split_lines(pieces))


def written(lines: Iterable[Line], is_gone: Callable[[], bool]) -> Iterator[Line]:
    """Yield the lines that have a time, as all have that a replica wrote.

    Args:
        lines: The answer.
        is_gone: Asks the cluster whether the log is gone.

    Raises:
        MissingError: There are none, as the kubelet says, and the cluster says that they are gone.
        NoLogError: There are none, and the kubelet does not say whether they are gone.
        UnavailableError: There are none for the moment, or what is in their place is not the
            kubelet's.
    """
    said, any_written = "", False
    for line in lines:
        any_written = any_written or bool(line.stamp)
        if line.stamp:
            yield line
        else:
            said = said or line.text
    if said and not any_written:
        shown = redact_and_cut(said, _SHOWN)
        if no_log := _NO_LOG.match(said):
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
    return (
        len(text) >= 20
        and text[4] == text[7] == "-"
        and text[10] == "T"
        and parse_time(text) is not None
    )


def _key(line: Line) -> int:
    return hash((line.stamp, line.text))
