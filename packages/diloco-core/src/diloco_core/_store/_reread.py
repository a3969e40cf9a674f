"""Reading again what was not as it was written: a bit may have changed on its way, and nothing be wrong in the store."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from .._errors import CorruptedObjectError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .._timing import Timing

T = TypeVar("T")

REREADS = (0.05, 0.4, 1.5)
"""Seconds between two readings."""

_log = logging.getLogger("diloco_core")


def read_again(timing: Timing, read: Callable[[], T], most: int | None = None) -> T:
    """What ``read`` returns; it is called a few times, until what it reads is as it was written.

    Args:
        timing: Its ``sleep`` is used.
        read: Reads and verifies; it must start from the beginning every time.
        most: How often it may be called again; as often as there are ``REREADS`` if left out.

    Raises:
        CorruptedObjectError: It is damaged where it lies.
    """
    for pause in REREADS[:most]:
        try:
            return read()
        except CorruptedObjectError as error:
            _log.warning("reading again in %g s: %s", pause, error)
            timing.sleep(pause)
    return read()
