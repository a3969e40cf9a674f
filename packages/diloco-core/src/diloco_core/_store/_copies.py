"""Copies of objects that nothing else in a store could replace: each lies beside its object and holds the same bytes.

With a copy, no single object that is damaged or deleted ends a run. To restore an object by hand, copy the copy.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from .._errors import CorruptedObjectError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_log = logging.getLogger("diloco_core")


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
