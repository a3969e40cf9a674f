"""Reading damaged data again: a bit may have changed in transit, while the object in the store is as it was written."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from .._errors import CorruptedObjectError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .._timing import Timing

T = TypeVar("T")

REREADS = (0.05, 0.4, 1.5)
"""Seconds to wait before each further reading."""

_log = logging.getLogger("diloco_core")


def read_again(timing: Timing, read: Callable[[], T], most: int | None = None) -> T:
    """Call ``read``, and call it again if it raises a CorruptedObjectError. Returns what it returns.

    Args:
        timing: Its ``sleep`` is used between two readings.
        read: Reads and verifies. It must start from the beginning every time.
        most: How often it may be called again; if left out, once for each of ``REREADS``.

    Raises:
        CorruptedObjectError: The last reading was damaged, too, so the object in the store is.
    """
    for pause in REREADS[:most]:
        try:
            return read()
        except CorruptedObjectError as error:
            _log.warning("reading again in %g s: %s", pause, error)
            timing.sleep(pause)
    return read()
