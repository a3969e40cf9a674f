"""What a life says when it ends: that it leaves, or why it has failed. Only the log and errors tell of it.

That it ends is said by the key alone (see :class:`._keys.Hint`), and that is all that decides whether anybody
waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError, FormatError
from ..._exchange._endings import as_text
from ..._redact import redact
from ..._wire._fields import Fields
from ..._wire._sealed import seal, unseal

if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST = 1000


def farewell(key: str, error: BaseException | None) -> bytes:
    """The content of a hint that a life leaves, or has failed with this error."""
    reason = "" if error is None else redact(as_text(error))[:_LONGEST]
    return seal("farewell", key, {"event": "left" if error is None else "failed", "reason": reason})


def read_farewell(key: str, read: Callable[[str], bytes | None]) -> tuple[str, str]:
    """How a life has ended, and why: ``left``, ``failed``, or ``left or failed`` where its hint cannot be read."""
    try:
        data = read(key)
        if data is not None:
            fields = Fields(unseal("farewell", key, data, key), key)
            return fields.text("event", "left|failed"), " ".join(fields.text("reason").split())
    except (CorruptedObjectError, FormatError):
        pass  # it says that the life has ended, and nothing depends on the rest
    return "left or failed", ""
