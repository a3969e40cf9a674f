"""Bounds on the size of the objects that a launcher reads: one bound per kind of object.

Such an object may have been written by a replica, or by a stranger who guessed its name. So a
reader checks the size itself, and never relies on what our own writers would have refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._errors import InvalidRequestError

if TYPE_CHECKING:
    from typing import Protocol

    class _Readable(Protocol):
        def read(self, size: int, /) -> bytes: ...


RESULT_BYTES = 16 * 1024 * 1024
"""Largest result of a replica, in bytes of JSON, on every backend. A backend may allow less."""
OUTCOME_BYTES = RESULT_BYTES + 1024 * 1024
"""Largest outcome, in bytes of JSON: a result and the texts beside it."""
RECORD_BYTES = 8 * 1024 * 1024
"""Largest record of a run or of a launch, in bytes."""
_PIECE = 1 << 20


def check_size(what: str, size: int, most: int) -> None:
    """Refuse an object that is larger than any object of its kind can be.

    Args:
        what: Name of the object in the error.
        size: Its size in bytes.
        most: The largest size allowed, in bytes.

    Raises:
        InvalidRequestError: The object is larger.
    """
    if size > most:
        raise InvalidRequestError(f"{what} is larger than {most} bytes, and is not read")


def read_bounded(file: _Readable, most: int, what: str) -> bytes:
    """Read a file or the body of an answer to its end.

    At most ``most`` bytes and one further piece are held in memory.

    Args:
        file: The file; ``read(n)`` returns at most n bytes, and no bytes at the end.
        most: The largest size allowed, in bytes.
        what: Name of the file in the error.

    Raises:
        InvalidRequestError: The file is larger; the rest of it is not read.
    """
    pieces: list[bytes] = []
    size = 0
    while piece := file.read(min(_PIECE, most + 1 - size)):
        size += len(piece)
        check_size(what, size, most)
        pieces.append(piece)
    return b"".join(pieces)
