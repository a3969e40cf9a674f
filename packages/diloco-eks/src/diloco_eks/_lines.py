"""The bytes of a pod's log as lines with their times."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from diloco_protocol import UnavailableError
from diloco_protocol.backend import redact_and_cut, split_lines

from ._errors import MissingError
from ._facts import parse_time

_SHOWN = 500
# What the kubelet says in place of a log that is gone, with status 200; pkg/kubelet/kuberuntime, and cri-client's logs.go.
_GONE = re.compile(
    r"unable to retrieve container logs for |failed to try resolving symlinks in path |"
    r"failed to (open|tail|seek|read) .*log file |rpc error: code = "
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


@dataclass
class Place:
    """How far a log has been read, so that a new connection continues where the old one broke.

    The server can only be asked for whole seconds, so what was read already is skipped by its time; several lines may share
    one.
    """

    stamp: str = ""
    lines: int = 0

    def fresh(self, lines: Iterable[Line]) -> Iterator[Line]:
        """The lines that were not read yet."""
        before, skip = self.stamp, self.lines
        for line in lines:
            key = _sortable(line.stamp)
            if before and line.stamp:
                if key < _sortable(before):
                    continue
                if line.stamp == before and skip:
                    skip -= 1
                    continue
            if line.stamp == self.stamp:
                self.lines += 1
            elif line.stamp:
                self.stamp, self.lines = line.stamp, 1
            yield line


def lines_of(pieces: Iterable[bytes]) -> Iterator[Line]:
    """Lines from pieces that end anywhere; very long ones are cut."""
    return map(_line, split_lines(pieces))


def written(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield the lines that have a time, as all have that a replica wrote.

    Raises:
        MissingError: There are none, and the kubelet says why.
        UnavailableError: There are none, and what there is in their place is not the kubelet's.
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
        if _GONE.match(said):
            raise MissingError(f"there is no log: {shown}")
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


def _sortable(stamp: str) -> tuple[str, str]:
    """A time stamp as a key to sort by, to the nanosecond; the stamp may lack trailing zeros."""
    fraction = stamp[20:].rstrip("Z").partition("+")[0] if stamp[19:20] == "." else ""
    return stamp[:19], fraction.ljust(9, "0")
