"""How large the objects may be that a launcher reads: one bound per kind, kept by the reader.

Whoever writes such an object may be a replica, or a stranger who guessed its name. So a reader
never relies on what a writer of ours would have refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._errors import InvalidRequestError

if TYPE_CHECKING:
    from typing import Protocol

    class _Readable(Protocol):
        def read(self, size: int, /) -> bytes: ...


RESULT_BYTES = 16 * 1024 * 1024
"""Largest result of a replica, in bytes of JSON, on every backend; a backend may carry less."""
OUTCOME_BYTES = RESULT_BYTES + 1024 * 1024
"""Largest outcome, in bytes of JSON: a result, and the texts beside it."""
RECORD_BYTES = 8 * 1024 * 1024
"""Largest record of a run or of a launch, in bytes."""
_PIECE = 1 << 20


def check_size(what: str, size: int, most: int) -> None:
    """Refuse an object that is larger than any of its kind can be.

    Args:
        what: What to call the object in the error.
        size: Its size in bytes.
        most: The largest size allowed, in bytes.

    Raises:
        InvalidRequestError: It is larger.
    """
    if size > most:
        raise InvalidRequestError(f"{what} is larger than {most} bytes, and is not read")


def read_bounded(file: _Readable, most: int, what: str) -> bytes:
    """Read a file or the body of an answer to its end, and hold at most ``most`` bytes and one piece of it in memory.

    Args:
        file: What to read; ``read(n)`` gives at most n bytes, and none at the end.
        most: The largest size allowed, in bytes.
        what: What to call it in the error.

    Raises:
        InvalidRequestError: It is larger; the rest is not read.
    """
    pieces: list[bytes] = []
    size = 0
    while piece := file.read(min(_PIECE, most + 1 - size)):
        size += len(piece)
        check_size(what, size, most)
        pieces.append(piece)
    return b"".join(pieces)
