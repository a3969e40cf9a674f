"""Small records in the store: JSON for people, and a checksum over every byte for programs.

A record ends with the xxh3-128 of all bytes before it. The seed of the checksum is made from the
record's key, so a valid record under another key fails, too. A record is verified before it is
parsed, so that nothing is ever decided by bytes that were not checked. Then its fields are read one
by one (:class:`Fields`), whose types and ranges are checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import xxhash

from .._errors import ConfigurationError, CorruptedObjectError, FormatError
from .._store._api import RECORD_BYTES

T = TypeVar("T")

LARGEST = 2**63 - 1

FORMAT = 8
"""Version of the format of all objects in a run's store.

It increases with each change that an older version would misread.
"""

_ENCODER = json.JSONEncoder(allow_nan=False)
_END = re.compile(rb',\n "xxh3_128": "([0-9a-f]{32})"\n}\n\Z')
_FORMAT = re.compile(rb'"format": ?(\d{1,9})\b')
# In a record of any version, the format is within so many bytes from its beginning.
_BEGINNING = 4096


def seal(kind: str, key: str, fields: Mapping[str, Any]) -> bytes:
    """A record as it is stored, with a line for each field.

    The same fields in the same order give the same bytes, so that a record can be written again.

    Args:
        kind: The kind of the record, such as "claim".
        key: The key under which it will be stored.
        fields: Its content: names, and values that JSON can express.

    Raises:
        ConfigurationError: The record is larger than one that is read.
    """
    # Not with ``indent``: that encoder is in Python, and took 40 ms for records of large models.
    lines = [
        f" {_ENCODER.encode(name)}: {_ENCODER.encode(value)}"
        for name, value in {"kind": kind, "format": FORMAT, **fields}.items()
    ]
    body = ("{\n" + ",\n".join(lines)).encode()
    record = b'%s,\n "xxh3_128": "%s"\n}\n' % (body, _checksum(body, key).encode())
    if len(record) > RECORD_BYTES:
        raise ConfigurationError(
            f"the run's object {key} would have {len(record)} bytes, and at most {RECORD_BYTES} "
            "are read: the model has too many tensors, or their names are too long"
        )
    return record


def unseal(kind: str, key: str, data: bytes, origin: str) -> dict[str, Any]:
    """Verify a stored record, and return its fields.

    Args:
        kind: The kind that the record must have.
        key: The key under which it is stored.
        data: Its bytes.
        origin: What it is called in errors.

    Raises:
        CorruptedObjectError: The record is damaged, or it was written under another key or as
            another kind.
        FormatError: Another version of diloco-core has written the record.
    """
    if len(data) > RECORD_BYTES:
        raise CorruptedObjectError(
            f"{origin} has {len(data)} bytes, but a record has at most {RECORD_BYTES}: it is "
            "damaged"
        )
    end = _END.search(data)
    if end is None:
        stored_format = _FORMAT.search(data[:_BEGINNING])
        if stored_format is not None and int(stored_format[1]) != FORMAT:
            raise _other_format(origin, int(stored_format[1]))
        raise CorruptedObjectError(
            f"{origin} is truncated or damaged: it does not end with a checksum"
        )
    if _checksum(data[: end.start()], key) != end[1].decode():
        raise CorruptedObjectError(
            f"{origin}: the checksum is wrong. The record is damaged, or it was written under "
            "another key."
        )
    try:
        record: dict[str, Any] = json.loads(data)
        record_kind, record_format = record.pop("kind"), record.pop("format")
        del record["xxh3_128"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptedObjectError(f"{origin} is not a record: {error}") from error
    if record_format != FORMAT:
        raise _other_format(origin, record_format)
    if record_kind != kind:
        shown_kind = f"{record_kind!r:.60}"
        raise CorruptedObjectError(f"{origin} is a record of kind {shown_kind}, not {kind!r}")
    return record


def unsealed_fields(kind: str, key: str, data: bytes, origin: str) -> Fields:
    """Return the fields of a stored record, to be read one by one.

    Arguments and errors are those of :func:`unseal`.
    """
    return Fields(unseal(kind, key, data, origin), origin)


def _checksum(body: bytes, key: str) -> str:
    return xxhash.xxh3_128_hexdigest(body, seed=xxhash.xxh3_64_intdigest(key.encode()))


def _other_format(origin: str, record_format: object) -> FormatError:
    return FormatError(
        f"{origin} has format {record_format!s:.60}, and this version of diloco-core reads format "
        f"{FORMAT} only. Continue with the version that the run was begun with, or begin a new run "
        "on another prefix."
    )


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
            raise CorruptedObjectError(f"{origin} must be a JSON object, not {fields!r:.60}")
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
        entry = f"an entry of {name!r}"
        return [self._whole(value, entry, least, most) for value in self.items(name)]

    def numbers(self, name: str, least: int = 0) -> dict[int, int]:
        """Whole numbers by rank, stored as a list of pairs in the order of the ranks."""
        pairs = self.items(name)
        if any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
            raise self.wrong(f"field {name!r} must be a list of pairs")
        by_rank = {}
        for rank, value in pairs:
            rank = self._whole(rank, f"a rank in {name!r}", 0, 99999)
            by_rank[rank] = self._whole(value, f"an entry of {name!r}", least, LARGEST)
        if len(by_rank) != len(pairs) or list(by_rank) != sorted(by_rank):
            raise self.wrong(f"field {name!r} must name every rank once, in order")
        return by_rank

    def texts_by_name(self, name: str) -> dict[str, str]:
        """Texts by name."""
        value = self._take(name)
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise self.wrong(
                f"field {name!r} must be a JSON object whose values are text, not {value!r:.60}"
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
        origin = f"{self._origin}, an entry of {name!r}"
        return [Fields(value, origin) for value in self.items(name)]

    def agree(self, name: str, expected: object) -> None:
        """Check that a field, which repeats a part of the record's key, agrees with the key."""
        value = self._take(name)
        if value != expected or type(value) is not type(expected):
            raise self.wrong(
                f"field {name!r} is {value!r:.60}, but according to the record's key it must be "
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
            raise self.wrong(f"field {name!r} must be {what}, not {value!r:.60}")
        return value

    def _whole(self, value: object, name: str, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(
                f"{name} must be a whole number from {least} to {most}, not {value!r:.60}"
            )
        return value

    def _text(self, value: object, name: str, pattern: str | None) -> str:
        if not isinstance(value, str):
            raise self.wrong(f"{name} must be text, not {value!r:.60}")
        if pattern is not None and re.fullmatch(pattern, value, re.ASCII) is None:
            raise self.wrong(f"{name} must be text that matches {pattern}, not {value!r:.60}")
        return value
