"""From the bytes of a log to the lines that were asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from toy_cloud import Chunk

from diloco_protocol import LogQuery
from diloco_protocol.backend import LineSplitter


class LineReader:
    """Lines with the time of their last byte, from chunks that begin and end anywhere.

    Only a newline ends a line. What an attempt leaves unfinished is a line of its own, not the
    begin of the next attempt's.
    """

    def __init__(self) -> None:
        self._begun: dict[str, LineSplitter] = {}  # it cuts lines that would fill the memory
        self._times: dict[str, float] = {}
        self._attempt = 1

    def feed(self, chunks: Iterable[Chunk]) -> Iterator[tuple[float, str]]:
        """The lines that these chunks complete."""
        for chunk in chunks:
            if chunk.attempt != self._attempt:
                yield from self.finish()
                self._attempt = chunk.attempt
            self._times[chunk.stream] = chunk.time
            for line in self._begun.setdefault(chunk.stream, LineSplitter()).feed(chunk.data):
                # Decoded as a whole line, since a character may lie across the border of two
                # chunks.
                yield chunk.time, line.decode(errors="replace")

    def finish(self) -> Iterator[tuple[float, str]]:
        """The lines that nobody will finish."""
        for stream, splitter in self._begun.items():
            if (rest := splitter.rest()) is not None:
                yield self._times[stream], rest.decode(errors="replace")
        self._begun.clear()


def of_stream(chunks: Iterable[Chunk], streams: str) -> Iterator[Chunk]:
    """The chunks of a stream, or of both."""
    return (chunk for chunk in chunks if streams in {"combined", chunk.stream})


def chosen(lines: Iterable[tuple[float, str]], query: LogQuery) -> Iterator[str]:
    """The lines of the right time in which the expression is found."""
    return (line for time, line in lines if query.selects(line, time))
