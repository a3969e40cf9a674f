"""A decoder for the few bodies that kubectl always sends as protobuf.

The result is what the same body would be as JSON. The envelope and the field numbers are those of
the ``generated.proto`` files of Kubernetes.
"""

from __future__ import annotations

import base64
from typing import Any

from .._objects import _refusals

Json = dict[str, Any]

MEDIA_TYPE = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\x00"

# Field number -> (name, kind); a dict as kind is a message, and ("map", kind) a map.
Fields = dict[int, tuple[str, Any]]

_ENVELOPE: Fields = {
    1: ("typeMeta", {1: ("apiVersion", "text"), 2: ("kind", "text")}),
    2: ("raw", "bytes"),
}
_META: Fields = {
    1: ("name", "text"),
    2: ("generateName", "text"),
    3: ("namespace", "text"),
    11: ("labels", ("map", "text")),
    12: ("annotations", ("map", "text")),
}
# Every object has these two: a status that a client sends is passed over.
_OBJECT: Fields = {1: ("metadata", _META), 3: ("status", "ignored")}
_NAMES = ("namespace", "verb", "group", "version", "resource", "subresource", "name")
_ATTRIBUTES: Fields = {number: (name, "text") for number, name in enumerate(_NAMES, 1)}
_DELETE_OPTIONS: Fields = {
    1: ("gracePeriodSeconds", "number"),
    4: ("propagationPolicy", "text"),
    5: ("dryRun", "texts"),
}
_REVIEW: Fields = {1: ("resourceAttributes", _ATTRIBUTES)}
_DATA: Fields = {2: ("data", ("map", "text")), 3: ("binaryData", ("map", "base64"))}
# The bodies that `kubectl create KIND` and other commands of kubectl send.
_KINDS: dict[str, Fields] = {
    "Eviction": {**_OBJECT, 2: ("deleteOptions", _DELETE_OPTIONS)},
    "SelfSubjectAccessReview": {**_OBJECT, 2: ("spec", _REVIEW)},
    "Namespace": _OBJECT,
    "ConfigMap": {**_OBJECT, **_DATA},
    "Secret": {**_OBJECT, 2: ("data", ("map", "base64")), 3: ("type", "text")},
}


def decode(body: bytes) -> Json:
    """Return the object in a body.

    Raises:
        ApiError: 400 if it is not such a message, 415 for a kind or a field that is understood only
            as JSON.
    """
    if not body.startswith(_MAGIC):
        raise _refusals.bad_request("the body has not the prefix of a protobuf object")
    try:
        envelope = _message(body[len(_MAGIC) :], _ENVELOPE)
        named = envelope.get("typeMeta", {})
        if named.get("kind") not in _KINDS:
            raise _refusals.unsupported_media_type(["application/json"])
        return {**named, **_message(envelope.get("raw", b""), _KINDS[named["kind"]])}
    except (IndexError, UnicodeDecodeError) as wrong:
        raise _refusals.bad_request(f"the protobuf object cannot be decoded: {wrong}") from None


def _message(data: bytes, fields: Fields) -> Json:
    document: Json = {}
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        value: Any
        value, place = _varint(data, place)
        if key & 7 == 2:
            value, place = data[place : place + value], place + value
        elif key & 7:
            raise IndexError(f"no field has the wire type {key & 7}")
        if place > len(data):
            raise IndexError("it ends too early")
        if key >> 3 in fields:
            _put(document, *fields[key >> 3], value)
        elif value:  # Go also sends empty fields
            raise _refusals.unsupported_media_type(["application/json"])
    return document


def _put(document: Json, name: str, kind: Any, value: int | bytes) -> None:
    if isinstance(value, int) != (kind == "number"):
        raise IndexError("a field is of another type")
    if isinstance(value, int):  # int64, in two's complement
        document[name] = value - (1 << 64) if value >= 1 << 63 else value
    elif isinstance(kind, dict):
        document[name] = _message(value, kind)
    elif isinstance(kind, tuple):
        entry = _message(value, {1: ("key", "text"), 2: ("value", kind[1])})
        document.setdefault(name, {})[entry.get("key", "")] = entry.get("value", "")
    elif kind == "texts":
        document.setdefault(name, []).append(value.decode())
    elif kind == "base64":
        document[name] = base64.b64encode(value).decode()
    elif kind == "text" and value:
        document[name] = value.decode()
    elif kind == "bytes":
        document[name] = value


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise IndexError("a number has more than 64 bits")
