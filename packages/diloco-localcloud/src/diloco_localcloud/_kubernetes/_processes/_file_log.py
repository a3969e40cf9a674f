"""A log that a shim writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._server._files import open_regular

if TYPE_CHECKING:
    from pathlib import Path

_LONGEST_LINE = 1 << 16  # more than an entry, with its time before it


class FileLog:
    """A log that is read as its file grows; it keeps the places of the entries, not the entries.

    Used under the cluster's lock.
    """

    def __init__(self, path: Path) -> None:
        self.ended = False
        self._path = path
        self._read = 0
        self._times: list[float] = []
        # Start and end of the text, and whether a newline follows.
        self._places: list[tuple[int, int, bool]] = []

    def times(self) -> list[float]:
        """Return the time of each entry; see ``Log``."""
        self._look()
        return self._times

    def entries(self, start: int, end: int) -> list[tuple[float, bytes]]:
        """Return some of the entries; see ``Log``."""
        self._look()
        chosen = self._places[start:end]
        if not chosen:
            return []
        first = chosen[0][0]
        try:
            with open_regular(self._path) as file:
                file.seek(first)
                text = file.read(chosen[-1][1] - first)
        except OSError:  # the pod and its folder are gone, or its program has replaced the file
            return []
        return [
            (moment, text[begin - first : end - first] + (b"\n" if whole else b""))
            for moment, (begin, end, whole) in zip(self._times[start:end], chosen, strict=True)
        ]

    def _look(self) -> None:
        try:
            with open_regular(self._path) as file:
                file.seek(self._read)
                # Only at newlines: a carriage return does not end a line.
                while (line := file.readline(_LONGEST_LINE)).endswith(b"\n"):
                    self._add(line)
        except (OSError, ValueError):  # a program has put other text there
            return

    def _add(self, line: bytes) -> None:
        moment, kind, text = line[:-1].split(b" ", 2)
        begin = self._read + len(line) - 1 - len(text)
        self._times.append(float(moment))
        self._places.append((begin, begin + len(text), kind == b"F"))
        self._read += len(line)
