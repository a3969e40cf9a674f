"""Small records in the store: JSON for people, and a checksum over every byte for programs.

A record ends with the xxh3-128 of all bytes before it. The seed of the checksum is made of the record's key, so a valid
record under another key fails too. Whoever reads a record verifies it before it is parsed: nothing that decides anything
is taken from bytes that nobody has checked.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import xxhash

from .._errors import CorruptedObjectError, FormatError
from .._store._api import RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = 5
"""Version of everything that a run keeps in its store. It changes with every change that an older version would misread."""

_END = re.compile(rb',\n "xxh3_128": "([0-9a-f]{32})"\n}\n\Z')
_FORMAT = re.compile(rb'"format": ?(\d{1,9})\b')
# Where the format stands in a record of any version: near its beginning.
_BEGINNING = 4096


def seal(kind: str, key: str, fields: Mapping[str, Any]) -> bytes:
    """A record as it is stored.

    The same fields in the same order give the same bytes, so that a record can be written again.

    Args:
        kind: What kind of record it is.
        key: Under which key it will be stored.
        fields: What it says; anything that JSON can express, under names of its own.
    """
    text = json.dumps({"kind": kind, "format": FORMAT, **fields}, indent=1, allow_nan=False)
    body = text.removesuffix("\n}").encode()
    return b'%s,\n "xxh3_128": "%s"\n}\n' % (body, _checksum(body, key).encode())


def unseal(kind: str, key: str, data: bytes, origin: str) -> dict[str, Any]:
    """The fields of a stored record, verified.

    Args:
        kind: What kind of record it must be.
        key: Under which key it was found.
        data: Its bytes.
        origin: What it is called in errors.

    Raises:
        CorruptedObjectError: It is not what was written under this key.
        FormatError: Another version of diloco-core has written it.
    """
    if len(data) > RECORD_BYTES:
        raise CorruptedObjectError(
            f"{origin} has {len(data)} bytes; a record has at most {RECORD_BYTES}"
        )
    end = _END.search(data)
    if end is None:
        written = _FORMAT.search(data[:_BEGINNING])
        if written is not None and int(written[1]) != FORMAT:
            raise _other_format(origin, int(written[1]))
        raise CorruptedObjectError(
            f"{origin} is truncated or damaged: it does not end with a checksum"
        )
    if _checksum(data[: end.start()], key) != end[1].decode():
        raise CorruptedObjectError(
            f"{origin}: the checksum is wrong. The record was damaged, or was written under another key."
        )
    try:
        record: dict[str, Any] = json.loads(data)
        written_kind, written_format = record.pop("kind"), record.pop("format")
        del record["xxh3_128"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptedObjectError(f"{origin} is not a record: {error}") from error
    if written_format != FORMAT:
        raise _other_format(origin, written_format)
    if written_kind != kind:
        raise CorruptedObjectError(f"{origin} is a record of kind {written_kind!r}, not {kind!r}")
    return record


def _checksum(body: bytes, key: str) -> str:
    return xxhash.xxh3_128_hexdigest(body, seed=xxhash.xxh3_64_intdigest(key.encode()))


def _other_format(origin: str, written: object) -> FormatError:
    return FormatError(
        f"{origin} has format {written}, and this version of diloco-core reads format {FORMAT} only. Go on with the version "
        "that began the run, or begin a new run on another prefix."
    )
