"""Reading damaged data again, or a copy of it.

A bit may have changed in transit, while the object in the store is as it was written. Of objects that nothing else in a store
could replace, copies lie beside them, and hold the same bytes: no single object that is damaged or deleted ends a run. To restore
an object by hand, copy the copy.
"""

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


def copy_key(key: str) -> str:
    """The key of the copy of an object: ``manifest.copy.json`` for ``manifest.json``."""
    name, _, ending = key.rpartition(".")
    return f"{name}.copy.{ending}"


def read_or_copy(read: Callable[[str], T], key: str, uri: str) -> T:
    """Read an object; if it is damaged or gone, read its copy, and say so in the log. None if both are gone.

    Args:
        read: Reads and verifies the object with a key. Returns None if there is none.
        key: The key of the object.
        uri: Where it is.

    Raises:
        CorruptedObjectError: The object is damaged, and its copy is damaged or gone; or the object is gone, and its copy is
            damaged.
    """
    damage: CorruptedObjectError | None = None
    try:
        found = read(key)
        if found is not None:
            return found
    except CorruptedObjectError as error:
        damage = error
    lost = f"{uri}/{key} is gone" if damage is None else str(damage).rstrip(".")
    try:
        found = read(copy_key(key))
    except CorruptedObjectError as error:
        raise CorruptedObjectError(f"{lost}. Its copy {copy_key(key)} is damaged, too") from error
    if found is not None:
        _log.error(
            "%s. Its copy %s is whole and is used instead. Something outside the run deletes or changes its objects: find out "
            "what does, and stop it.",
            lost,
            copy_key(key),
        )
    elif damage is not None:
        raise CorruptedObjectError(f"{lost}. Its copy {copy_key(key)} is gone") from damage
    return found
