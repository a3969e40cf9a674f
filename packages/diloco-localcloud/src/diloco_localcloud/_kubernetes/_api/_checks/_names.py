"""Rules for names and labels, with the API server's messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Json = dict[str, Any]
Cause = tuple[str, str, str]

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_DATA_KEY = re.compile(r"[-._a-zA-Z0-9]+")

_ENDS = "and must start and end with an alphanumeric character"
_ANY = "alphanumeric characters, '-', '_' or '.'"
_LOWER = "must consist of lower case alphanumeric characters"

# The server's words without the examples and the pattern that follow them.
LABEL_WORDS = f"a lowercase RFC 1123 label {_LOWER} or '-', {_ENDS}"
SUBDOMAIN_WORDS = f"a lowercase RFC 1123 subdomain {_LOWER}, '-' or '.', {_ENDS}"
VALUE_WORDS = f"a valid label must be an empty string or consist of {_ANY}, {_ENDS}"
KEY_WORDS = f"name part must consist of {_ANY}, {_ENDS}"
DATA_KEY_WORDS = f"a valid config key must consist of {_ANY}"


def invalid(field: str, value: object, words: str) -> Cause:
    """Return the cause of a 422 for a wrong value, shown as the server shows it."""
    return field, "FieldValueInvalid", f"Invalid value: {shown(value)}: {words}"


def required(field: str, words: str = "") -> Cause:
    """Return the cause for a missing field."""
    return field, "FieldValueRequired", "Required value" + (f": {words}" if words else "")


def forbidden(field: str, words: str) -> Cause:
    """Return the cause for a field that may not be set."""
    return field, "FieldValueForbidden", f"Forbidden: {words}"


def not_supported(field: str, value: object, allowed: list[str]) -> Cause:
    """Return the cause for a value that is not among the allowed ones."""
    listed = ", ".join(f'"{item}"' for item in allowed)
    words = f"Unsupported value: {shown(value)}: supported values: {listed}"
    return field, "FieldValueNotSupported", words


def shown(value: object) -> str:
    """Return a value as messages show it: strings in quotes, booleans in lower case."""
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else str(value)


def is_label(text: str) -> bool:
    """Return whether a text is a DNS label."""
    return len(text) <= 63 and _LABEL.fullmatch(text) is not None


def metadata(meta: Mapping[str, Any], *, label: bool = False) -> Iterator[Cause]:
    """Yield what is wrong with an object's name, owners, labels and annotations."""
    name, most = str(meta.get("name", "")), 63 if label else 253
    if not name:
        yield required("metadata.name", "name or generateName is required")
    elif len(name) > most:
        yield invalid("metadata.name", name, f"must be no more than {most} characters")
    elif not (_LABEL if label else _SUBDOMAIN).fullmatch(name):
        yield invalid("metadata.name", name, LABEL_WORDS if label else SUBDOMAIN_WORDS)
    for owner in meta.get("ownerReferences") or []:
        for part in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(part):
                yield invalid(f"metadata.ownerReferences.{part}", "", "must not be empty")
    yield from labels(meta.get("labels") or {}, "metadata.labels")
    yield from keys(meta.get("annotations") or {}, "metadata.annotations")


def data_keys(obj: Mapping[str, Any]) -> Iterator[Cause]:
    """Yield what is wrong with the keys of a ConfigMap or Secret, which may become file names."""
    for part in ("data", "binaryData", "stringData"):
        for key in obj.get(part) or {}:
            field = f"{'data' if part == 'stringData' else part}[{key}]"
            if len(key) > 253:
                yield invalid(field, key, "must be no more than 253 characters")
            if not _DATA_KEY.fullmatch(key):
                yield invalid(field, key, DATA_KEY_WORDS)
            if key in (".", ".."):
                yield invalid(field, key, f"must not be '{key}'")
            elif key.startswith(".."):
                yield invalid(field, key, "must not start with '..'")


def limits(obj: Mapping[str, Any]) -> Iterator[Cause]:
    """Yield what the stand-in does not serve of a LimitRange."""
    for place, item in enumerate(obj["spec"].get("limits") or []):
        if item.get("type") != "Container" or item.keys() - {"type", "max"}:
            words = "the stand-in serves max alone, of the type Container"
            yield forbidden(f"spec.limits[{place}]", words)


def labels(pairs: Mapping[str, str], field: str) -> Iterator[Cause]:
    """Yield what is wrong with a set of labels."""
    yield from keys(pairs, field)
    for value in pairs.values():
        if len(value) > 63:
            yield invalid(field, value, "must be no more than 63 characters")
        elif not _VALUE.fullmatch(value):
            yield invalid(field, value, VALUE_WORDS)


def keys(pairs: Mapping[str, str], field: str) -> Iterator[Cause]:
    """Yield what is wrong with the keys of labels or annotations."""
    for key in pairs:
        prefix, slash, name = key.rpartition("/")
        if not name or len(name) > 63 or not _VALUE.fullmatch(name):
            yield invalid(field, key, KEY_WORDS)
        elif slash and not _SUBDOMAIN.fullmatch(prefix):
            yield invalid(field, key, f"prefix part {SUBDOMAIN_WORDS}")
