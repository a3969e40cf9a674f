"""Splitting the bytes of a log into lines.

Any program may have written the log, and a line without an end must not fill the launcher's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
