"""Reading the logs of a replica: tail, follow, by time, by stream, over all its attempts.

However long a line is, `LINE_BYTES` of it are held; what follows is cut off, and the line says so.

A replica writes its stdout and stderr straight into two files, so that no process of ours can lose
or delay a line. The time at which a line was written is known from the supervisor's samples of the
file sizes (`SAMPLE_SECONDS` apart while the logs grow): it is that of the first sample that covers
the line's last byte. The two streams are merged by these times, too; within one sample, stdout
comes first.
"""

from __future__ import annotations

import bisect
import contextlib
import heapq
import json
import math
import os
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from diloco_protocol import Backoff, LogQuery
from diloco_protocol.backend import LINE_BYTES, LineSplitter, Look, follow

from ._files import open_own_stream
from ._rundir import AttemptDir, ReplicaDir
from ._verdict import LATEST

#: The files behind the name of a stream.
STREAMS: dict[str, tuple[str, ...]] = {
    "stdout": ("stdout",),
    "stderr": ("stderr",),
    "combined": ("stdout", "stderr"),
}
#: Seconds between two samples of the sizes of a growing log: the resolution of ``since`` and
#: ``until``.
SAMPLE_SECONDS = 0.5
_BLOCK = 1 << 16
# How far back to look for the beginning of one line: a file that is one line of terabytes, most of
# it holes, must not keep a tail busy for hours.
_FAR = 64 * LINE_BYTES
# The samples of 24 days in which a log grew all the time; lines after them have the time of the
# newest one. The limit is needed because a replica can write to the file of the samples.
_MOST_SAMPLES = 1 << 22
_SAMPLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log, without its line end; it may have been cut.

    Its last byte in the file is the one before ``end``.
    """

    text: str
    end: int


def tail_lines(path: Path, n_lines: int) -> list[Line]:
    """Return the last ``n_lines`` lines of a file, including an unfinished one.

    Only as much of the file is read as needed. Memory is bounded by those lines as they are
    returned, however long they are in the file.
    """
    if n_lines <= 0:
        return []
    try:
        stream = open_own_stream(path, "rb")
    except (FileNotFoundError, NotADirectoryError):
        return []
    with stream:
        size = stream.seek(0, os.SEEK_END)
        start = stream.seek(_begin_of_last(stream, size, n_lines))
        # What is written meanwhile is not read, or there would be more lines than were asked for.
        return list(_lines(LineSplitter(), _pieces(stream, start, size), start, last=True))


def _begin_of_last(stream: IO[bytes], size: int, n_lines: int) -> int:
    """Return where the last ``n_lines`` lines of a file of ``size`` bytes begin.

    That is within a line if the line is longer than `_FAR`.
    """
    end = size - 1  # a newline in the last place ends the last line and begins no other
    wanted = n_lines
    line_end = end
    while end > 0:
        begin = max(0, end - _BLOCK)
        stream.seek(begin)
        block = stream.read(end - begin)
        newlines = block.count(b"\n")
        if newlines >= wanted:
            place = len(block)
            for _ in range(wanted):
                place = block.rfind(b"\n", 0, place)
            return begin + place + 1
        if newlines:
            line_end = begin + block.find(b"\n")
        elif line_end - begin > _FAR:
            return begin
        wanted -= newlines
        end = begin
    return 0


def _pieces(stream: IO[bytes], start: int, end: int) -> Iterator[bytes]:
    while piece := stream.read(min(_BLOCK, end - start)):
        start += len(piece)
        yield piece


def _lines(
    splitter: LineSplitter, pieces: Iterable[bytes], before: int, *, last: bool
) -> Iterator[Line]:
    """Yield the lines that the pieces complete; an unfinished one only if it stays so (``last``).

    Args:
        splitter: The splitter that puts the lines together.
        pieces: The new bytes.
        before: The number of bytes of the file that the splitter has never seen.
        last: Whether these are the last pieces.
    """
    for piece in pieces:
        for raw in splitter.feed(piece):
            yield Line(raw.decode(errors="replace"), before + splitter.position)
    if last and (rest := splitter.rest()) is not None:
        yield Line(rest.decode(errors="replace"), before + splitter.position)


@dataclass
class _Reader:
    """A reader of whole lines of a growing file, from where it stopped the last time."""

    path: Path
    offset: int = 0
    ended: bool = False
    splitter: LineSplitter = field(default_factory=LineSplitter)

    def read(self, *, last: bool, size: int | None = None, limit: int = 1 << 18) -> list[Line]:
        """Return the new lines in the next ``limit`` bytes.

        An unfinished one is among them only if it stays so (``last``). Sets ``ended`` if this was
        the end of a file to which nothing is written any more, or of its first ``size`` bytes.
        """
        lines = []
        if size is not None and size < self.offset:  # the replica has truncated it
            self.offset = 0
            # The lines that come now are counted after those before, and so are newer.
            lines = list(_lines(self.splitter, (), 0, last=True))
        room = limit if size is None else max(0, min(limit, size - self.offset))
        data = b""
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            open_own_stream(self.path, "rb") as stream,
        ):
            stream.seek(self.offset)
            data = stream.read(room)
        self.offset += len(data)
        self.ended = last and (len(data) < room or self.offset == size or not room)
        return lines + list(_lines(self.splitter, [data], 0, last=self.ended))


@dataclass
class _Clock:
    """A clock that tells from the samples when a byte of an attempt's logs was written."""

    attempt: AttemptDir
    begins_at: float = 0.0  # no line is older
    times: array[float] = field(default_factory=lambda: array("d"))
    sizes: dict[str, array[int]] = field(
        default_factory=lambda: {"stdout": array("q"), "stderr": array("q")}
    )
    reader: _Reader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = _Reader(self.attempt.times)

    def refresh(self) -> None:
        # There is a sample only where a log has grown, so there are at most this many bytes of
        # them; any more were written by another program.
        most = _SAMPLE_BYTES * sum(size_of(self.attempt.log(stream)) for stream in self.sizes)
        while self.reader.offset <= most and len(self.times) < _MOST_SAMPLES:
            if not (lines := self.reader.read(last=False)):
                return
            for line in lines:
                if (sample := read_sample(line.text)) is not None:
                    moment, out, err = sample
                    self.times.append(max(moment, self._after()))
                    self.sizes["stdout"].append(out)
                    self.sizes["stderr"].append(err)

    def at(self, stream: str, end: int, otherwise: float) -> float:
        index = bisect.bisect_left(self.sizes[stream], end)
        return self.times[index] if index < len(self.times) else max(otherwise, self._after())

    def _after(self) -> float:
        """Return a time after all samples, or that of the last line of the attempt before.

        What was written later stays later, even if the clock was set back meanwhile.
        """
        return math.nextafter(self.times[-1], math.inf) if self.times else self.begins_at


def _newest(attempt: AttemptDir, names: tuple[str, ...]) -> float:
    """Return the time of lines that no sample covers: the last change of the files."""
    times = [0.0]
    for name in names:
        with contextlib.suppress(OSError):
            times.append(attempt.log(name).stat().st_mtime)
    return max(times)


def tail(replica: ReplicaDir, n_lines: int, streams: str = "combined") -> list[str]:
    """Return the last ``n_lines`` lines over all attempts, oldest first."""
    names = STREAMS[streams]
    result: list[str] = []
    for attempt in reversed(replica.attempts()):
        wanted = n_lines - len(result)
        if wanted <= 0:
            break
        clock = _Clock(attempt)
        clock.refresh()
        otherwise = _newest(attempt, names)
        lines = [
            (clock.at(name, line.end, otherwise), order, line.end, line.text)
            for order, name in enumerate(names)
            for line in tail_lines(attempt.log(name), wanted)
        ]
        result = [text for _, _, _, text in sorted(lines)[-wanted:]] + result
    return result


def iterate(
    replica: ReplicaDir,
    terminal: Callable[[], bool],
    query: LogQuery,
    *,
    interval: float = 0.2,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.time,
) -> Iterator[str]:
    """Iterate over the lines of a replica, without line ends, attempt after attempt.

    Args:
        replica: The replica whose logs are read.
        terminal: Says whether the replica has ended for good.
        query: The selection of lines.
        interval: Seconds between two looks.
        sleep: Waits for so many seconds, for tests.
        clock: Unix seconds, for tests.
    """
    names = STREAMS[query.streams]
    done, latest = 0, 0.0  # attempts that were read to their ends; the time of the newest line
    current: _Attempt | None = None

    def lines(last: bool) -> Generator[str, None, Look]:
        nonlocal done, latest, current
        attempts = replica.attempts()
        while done < len(attempts):
            current = current or _Attempt(attempts[done], names, latest)
            attempts = replica.attempts()
            over = last or len(attempts) > done + 1
            for moment, text in current.lines(last=over):
                latest = max(latest, moment)
                if query.selects(text, moment):
                    yield text
            if not over:
                break
            current = None
            done += 1
        return Look(fresh=False)

    pauses = Backoff(first=interval, cap=interval, jitter=0.0, sleep=sleep)
    return follow(query, lines, terminal, pauses, lambda: clock() - SAMPLE_SECONDS)


class _Attempt:
    """The lines of one attempt with their times, as they come."""

    def __init__(self, attempt: AttemptDir, names: tuple[str, ...], begins_at: float) -> None:
        self._attempt = attempt
        self._names = names
        self._clock = _Clock(attempt, begins_at)
        self._readers = {name: _Reader(attempt.log(name)) for name in names}

    def lines(self, *, last: bool) -> Iterator[tuple[float, str]]:
        streams = [self._timed(order, name, last) for order, name in enumerate(self._names)]
        return ((moment, text) for moment, _, _, text in heapq.merge(*streams))

    def _timed(self, order: int, name: str, last: bool) -> Iterator[tuple[float, int, int, str]]:
        reader = self._readers[name]
        # Reads up to the present size: a replica that writes faster than we read would otherwise
        # keep us reading without end.
        size = size_of(reader.path)
        while True:
            before = reader.offset
            new_lines = reader.read(last=last, size=size)
            self._clock.refresh()
            otherwise = _newest(self._attempt, self._names)
            for line in new_lines:
                yield self._clock.at(name, line.end, otherwise), order, line.end, line.text
            if reader.ended or reader.offset in {before, size}:
                return


class Sampler:
    """A sampler that appends ``[unix seconds, bytes of stdout, bytes of stderr]`` to a file.

    It does so whenever one of the logs has grown.
    """

    def __init__(self) -> None:
        self._last: tuple[object, int, int] | None = None

    def sample(self, attempt: AttemptDir) -> None:
        """Look at the logs of ``attempt`` once."""
        sizes = [size_of(attempt.log(stream)) for stream in ("stdout", "stderr")]
        current = (attempt.path, sizes[0], sizes[1])
        if current == self._last or not any(sizes):
            return
        with open_own_stream(attempt.times, "ab") as stream:
            stream.write(json.dumps([time.time(), *sizes]).encode() + b"\n")
        self._last = current


def size_of(path: Path) -> int:
    """Return the number of bytes in a file; 0 if there is none that can be looked at."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_sample(text: str) -> tuple[float, int, int] | None:
    """Return the sample in a line that `Sampler` wrote; None if it is something else.

    No log is withheld because of that.
    """
    try:
        moment, out, err = json.loads(text)
        moment, out, err = float(moment), int(out), int(err)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    in_range = 0 <= moment <= LATEST and 0 <= out < 1 << 63 and 0 <= err < 1 << 63
    return (moment, out, err) if in_range else None
