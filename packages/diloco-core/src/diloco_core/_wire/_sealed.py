"""Small records in the store: JSON for people, and a checksum over every byte for programs.

A record ends with the xxh3-128 of all bytes before it. The seed of the checksum is made from the
record's key, so a valid record under another key fails, too. A record is verified before it is
parsed, so that nothing is ever decided by bytes that were not checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import xxhash

from .._errors import ConfigurationError, CorruptedObjectError, FormatError
from .._store._api import RECORD_BYTES
from ._fields import Fields

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
