"""Reading the fields of an unsealed record, whose types and ranges are checked.

If a field has a wrong one, an error names the record and the field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from .._errors import CorruptedObjectError

T = TypeVar("T")

LARGEST = 2**63 - 1


class Fields:
    """The fields of one record, which are read one by one.

    Each method raises CorruptedObjectError for a wrong field.

    Args:
        fields: The record: names and values.
        origin: What the record is called in errors.
    """

    def __init__(self, fields: object, origin: str) -> None:
        self._origin = origin
        if not isinstance(fields, dict):
            raise CorruptedObjectError(f"{origin} must be a JSON object, not {_shown(fields)}")
        self._fields: Mapping[str, Any] = fields

    def names(self) -> set[str]:
        """The names of the fields."""
        return set(self._fields)

    def whole(self, name: str, least: int = 0, most: int = LARGEST) -> int:
        """A whole number from ``least`` to ``most``."""
        return self._whole(self._take(name), f"field {name!r}", least, most)

    def truth(self, name: str) -> bool:
        """True or false."""
        return self._of_type(name, bool, "true or false")

    def text(self, name: str, pattern: str | None = None) -> str:
        """Text; if a ``pattern`` is given, all of the text must match it."""
        return self._text(self._take(name), f"field {name!r}", pattern)

    def items(self, name: str) -> list[Any]:
        """A list of anything."""
        return self._of_type(name, list, "a list")

    def texts(self, name: str, pattern: str | None = None) -> list[str]:
        """A list of texts."""
        return [self._text(value, f"an entry of {name!r}", pattern) for value in self.items(name)]

    def wholes(self, name: str, least: int = 0, most: int = LARGEST) -> list[int]:
        """A list of whole numbers."""
        return [
            self._whole(value, f"an entry of {name!r}", least, most) for value in self.items(name)
        ]

    def numbers(self, name: str, least: int = 0) -> dict[int, int]:
        """Whole numbers by rank, stored as a list of pairs in the order of the ranks."""
        pairs = self.items(name)
        if any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
            raise self.wrong(f"field {name!r} must be a list of pairs")
        by_rank = {
            self._whole(rank, f"a rank in {name!r}", 0, 99999): self._whole(
                value, f"an entry of {name!r}", least, LARGEST
            )
            for rank, value in pairs
        }
        if len(by_rank) != len(pairs) or list(by_rank) != sorted(by_rank):
            raise self.wrong(f"field {name!r} must name every rank once, in order")
        return by_rank

    def texts_by_name(self, name: str) -> dict[str, str]:
        """Texts by name."""
        value = self._take(name)
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise self.wrong(
                f"field {name!r} must be a JSON object whose values are text, not {_shown(value)}"
            )
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """An object with any content, which the caller has to check."""
        return self._of_type(name, dict, "a JSON object")

    def part(self, name: str) -> Fields:
        """An object with fields of its own."""
        return Fields(self._take(name), f"{self._origin}, field {name!r}")

    def parts(self, name: str) -> list[Fields]:
        """A list of objects."""
        return [
            Fields(value, f"{self._origin}, an entry of {name!r}") for value in self.items(name)
        ]

    def agree(self, name: str, expected: object) -> None:
        """Check that a field, which repeats a part of the record's key, agrees with the key."""
        value = self._take(name)
        if value != expected or type(value) is not type(expected):
            raise self.wrong(
                f"field {name!r} is {_shown(value)}, but according to the record's key it must be "
                f"{expected!r}"
            )

    def wrong(self, fault: str) -> CorruptedObjectError:
        """The error for a wrong field; ``fault`` says what is wrong."""
        return CorruptedObjectError(f"{self._origin}: {fault}")

    def _take(self, name: str) -> Any:
        if name not in self._fields:
            raise self.wrong(f"field {name!r} is missing")
        return self._fields[name]

    def _of_type(self, name: str, kind: type[T], what: str) -> T:
        value = self._take(name)
        if not isinstance(value, kind):
            raise self.wrong(f"field {name!r} must be {what}, not {_shown(value)}")
        return value

    def _whole(self, value: object, name: str, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(
                f"{name} must be a whole number from {least} to {most}, not {_shown(value)}"
            )
        return value

    def _text(self, value: object, name: str, pattern: str | None) -> str:
        if not isinstance(value, str) or (
            pattern is not None and re.fullmatch(pattern, value, re.ASCII) is None
        ):
            raise self.wrong(
                f"{name} must be text{f' that matches {pattern}' if pattern else ''}, not "
                f"{_shown(value)}"
            )
        return value


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
