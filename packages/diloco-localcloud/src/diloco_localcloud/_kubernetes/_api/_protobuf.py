"""The few bodies that kubectl sends as protobuf, whatever the server prefers: decoded to what JSON would say.

The envelope and the field numbers are those of the ``generated.proto`` files of Kubernetes.
"""

from __future__ import annotations

from typing import Any

from .._objects import _refusals

Json = dict[str, Any]

MEDIA_TYPE = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\x00"

# Field number -> (name, kind); a dict as kind is a message, and a "*" before a kind makes a list.
_ENVELOPE = {1: ("typeMeta", {1: ("apiVersion", "text"), 2: ("kind", "text")}), 2: ("raw", "bytes")}
_META = {
    1: ("name", "text"),
    2: ("generateName", "text"),
    3: ("namespace", "text"),
}
_ATTRIBUTES = {
    1: ("namespace", "text"),
    2: ("verb", "text"),
    3: ("group", "text"),
    4: ("version", "text"),
    5: ("resource", "text"),
    6: ("subresource", "text"),
    7: ("name", "text"),
}
_DELETE_OPTIONS = {
    1: ("gracePeriodSeconds", "number"),
    2: ("preconditions", {1: ("uid", "text"), 2: ("resourceVersion", "text")}),
    3: ("orphanDependents", "flag"),
    4: ("propagationPolicy", "text"),
    5: ("dryRun", "*text"),
}
_KINDS: dict[str, Any] = {
    "DeleteOptions": _DELETE_OPTIONS,
    "Eviction": {1: ("metadata", _META), 2: ("deleteOptions", _DELETE_OPTIONS)},
    "SelfSubjectAccessReview": {
        1: ("metadata", _META),
        2: (
            "spec",
            {
                1: ("resourceAttributes", _ATTRIBUTES),
                2: ("nonResourceAttributes", {1: ("path", "text"), 2: ("verb", "text")}),
            },
        ),
    },
}


def decode(body: bytes) -> Json:
    """The object in a body.

    Raises:
        ApiError: 400 if it is not such a message, 415 for a kind that is understood as JSON only.
    """
    if not body.startswith(_MAGIC):
        raise _refusals.bad_request("the body has not the prefix of a protobuf object")
    try:
        envelope = _message(body[len(_MAGIC) :], _ENVELOPE)
        kind = envelope.get("typeMeta", {}).get("kind", "")
        if kind not in _KINDS:
            raise _refusals.unsupported_media_type(MEDIA_TYPE, ["application/json"])
        return {**envelope["typeMeta"], **_message(envelope.get("raw", b""), _KINDS[kind])}
    except (IndexError, UnicodeDecodeError) as wrong:
        raise _refusals.bad_request(f"the protobuf object cannot be decoded: {wrong}") from None


def _message(data: bytes, fields: dict[int, tuple[str, Any]]) -> Json:
    document: Json = {}
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, wire = key >> 3, key & 7
        value: Any
        if wire == 0:
            value, place = _varint(data, place)
        elif wire == 2:
            length, place = _varint(data, place)
            if place + length > len(data):
                raise IndexError("it ends too early")
            value, place = data[place : place + length], place + length
        else:
            value, place = b"", place + {1: 8, 5: 4}.get(wire, len(data))
        if number in fields:
            name, kind = fields[number]
            if kind == "*text":
                document.setdefault(name, []).append(_value(value, "text"))
            else:
                document[name] = _value(value, kind)
    return document


def _value(value: Any, kind: Any) -> Any:
    if isinstance(value, int) != (kind in ("flag", "number")):
        raise IndexError("a field is of another type")
    if isinstance(kind, dict):
        return _message(value, kind)
    if kind == "text":
        return value.decode()
    if kind == "flag":
        return bool(value)
    if kind == "number":  # int64, in two's complement
        return value - (1 << 64) if value >= 1 << 63 else value
    return value


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
