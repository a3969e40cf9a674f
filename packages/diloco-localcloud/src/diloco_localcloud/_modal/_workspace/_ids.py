"""Identifiers as Modal makes them: a prefix that names the kind, and 22 letters or digits."""

from __future__ import annotations

import itertools
import secrets
import string

_LETTERS = string.ascii_letters + string.digits


class Ids:
    """Makes identifiers that never come again, in this stand-in or another.

    Its owner calls it under a lock.
    """

    def __init__(self) -> None:
        self._salt = "".join(secrets.choice(_LETTERS) for _ in range(16))
        self._count = itertools.count()

    def make(self, prefix: str) -> str:
        """Return a new identifier, such as ``fc-`` and 22 characters."""
        number, digits = next(self._count), ""
        for _ in range(6):
            number, digit = divmod(number, len(_LETTERS))
            digits = _LETTERS[digit] + digits
        return f"{prefix}-{self._salt}{digits}"
