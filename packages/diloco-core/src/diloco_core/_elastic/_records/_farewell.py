"""What a life writes when it ends: that it leaves, or why it has failed. The content is only shown in log messages and errors.

That the life ends follows from the key alone (see :class:`._keys.Hint`), and only the key decides whether others wait for it.
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
    """The content of the hint that a life leaves (``error`` is None) or has failed with this error."""
    reason = "" if error is None else redact(as_text(error))[:_LONGEST]
    return seal("farewell", key, {"event": "left" if error is None else "failed", "reason": reason})


def read_farewell(key: str, read: Callable[[str], bytes | None]) -> tuple[str, str]:
    """How a life has ended (``left``, ``failed``, or ``left or failed`` if its hint cannot be read), and why."""
    try:
        data = read(key)
        if data is not None:
            fields = Fields(unseal("farewell", key, data, key), key)
            return fields.text("event", "left|failed"), " ".join(fields.text("reason").split())
    except (CorruptedObjectError, FormatError):
        pass  # the hint's key says that the life has ended, and nothing depends on its content
    return "left or failed", ""
