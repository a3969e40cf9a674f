"""A log that a shim writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class FileLog:
    """Reads on as the file grows; keeps the places of the lines, and not the lines. Used under the cluster's lock."""

    def __init__(self, path: Path) -> None:
        self.ended = False
        self._path = path
        self._read = 0
        self._times: list[float] = []
        self._places: list[
            tuple[int, int, bool]
        ] = []  # start and end of the text, and whether a newline follows

    def times(self) -> list[float]:
        """When each line came."""
        self._look()
        return self._times

    def lines(self, start: int) -> list[tuple[float, bytes]]:
        """(time, line with its newline) from the ``start``-th on."""
        self._look()
        if start >= len(self._places):
            return []
        first = self._places[start][0]
        with self._path.open("rb") as file:
            file.seek(first)
            text = file.read(self._places[-1][1] - first)
        entries = []
        for moment, (begin, end, whole) in zip(
            self._times[start:], self._places[start:], strict=True
        ):
            entries.append((moment, text[begin - first : end - first] + (b"\n" if whole else b"")))
        return entries

    def _look(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                fresh = file.read()
        except FileNotFoundError:
            return
        for line in _split(fresh):
            moment, kind, text = line[:-1].split(b" ", 2)
            begin = self._read + len(line) - 1 - len(text)
            self._times.append(float(moment))
            self._places.append((begin, begin + len(text), kind == b"F"))
            self._read += len(line)


def _split(data: bytes) -> list[bytes]:
    """The whole lines; at newlines only, as a carriage return does not end a line."""
    return [part + b"\n" for part in data.split(b"\n")[:-1]]
