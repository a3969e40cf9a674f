"""The check of a request against the model that botocore ships, with AWS's messages."""

from __future__ import annotations

import functools
import itertools
import re
import sys
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..._server._errors import StandInError
from ._refused import RefusedError, invalid, wrong_parameter

if TYPE_CHECKING:
    from botocore.model import ServiceModel, Shape

Json = dict[str, Any]

_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("integer", "long"), (int,)),
    **dict.fromkeys(("float", "double"), (int, float)),
    **dict.fromkeys(("map", "structure"), (dict,)),
    "string": (str,),
    "boolean": (bool,),
    "timestamp": (int, float, str),
    "list": (list,),
}


def check(service: ServiceModel, operation: str, request: Json) -> None:
    """Check a request against the model: types, required members, lengths, ranges, patterns, enums.

    Members that the model does not have are ignored, as AWS ignores them.

    Raises:
        RefusedError: a ``ValidationException`` (for CloudWatch Logs an
            ``InvalidParameterException``) that lists everything that is wrong, or a
            ``SerializationException``.
    """
    shape = service.operation_model(operation).input_shape
    wrong = [] if shape is None else list(_violations(shape, request, ""))
    if wrong:
        s = "s" if len(wrong) > 1 else ""
        message = f"{len(wrong)} validation error{s} detected: {'; '.join(wrong)}"
        raise wrong_parameter(message) if service.service_name == "logs" else invalid(message)


def _violations(shape: Shape, value: Any, path: str) -> Iterator[str]:
    """Yield what is wrong with a value and its parts.

    Of a map AWS words it otherwise: it names the whole map, and all rules of its keys or values.
    """
    if value is not None and not _is_a(value, shape.type_name):
        where = path or "the request"
        raise RefusedError(
            "SerializationException", f"{where} must be of type {shape.type_name}, not {value}"
        )
    for rule in _broken(shape, value):
        shown = "null" if value is None else f"'{value}'"
        yield f"Value {shown} at '{path}' failed to satisfy constraint: Member must {rule}"
    for part, below, item in _parts(shape, value):
        yield from _violations(below, item, f"{path}.{part}".lstrip("."))


def _is_a(value: object, kind: str) -> bool:
    if isinstance(value, int) and value.bit_length() > 63:
        return False  # no type of AWS holds it, and arithmetic would fail
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _parts(shape: Any, value: Any) -> Iterator[tuple[str, Shape, Any]]:
    """Yield (name in a path, shape, value) of what a value consists of.

    A required member that is missing is among them, as None.
    """
    if value is None:
        return
    if shape.type_name == "structure":
        for name, member in shape.members.items():
            if value.get(name) is not None or name in shape.required_members:
                yield name[:1].lower() + name[1:], member, value.get(name)
    elif shape.type_name == "list":
        for number, item in enumerate(value, 1):
            yield f"{number}.member", shape.member, item
    elif shape.type_name == "map":
        for key, item in value.items():
            yield key, shape.key, key
            yield key, shape.value, item


def _broken(shape: Shape, value: Any) -> Iterator[str]:
    """Yield the rules of a shape that a value breaks."""
    kind, model = shape.type_name, shape.metadata
    if value is None:
        yield "not be null"
        return
    what, size = "length", 0
    if kind in {"integer", "long", "float", "double"}:
        what, size = "value", value
    elif kind in {"string", "list", "map"}:
        size = len(value)
    if size > model.get("max", size):
        yield f"have {what} less than or equal to {model['max']}"
    elif size < model.get("min", size):
        yield f"have {what} greater than or equal to {model['min']}"
    if "enum" in model and value not in model["enum"]:
        yield f"satisfy enum value set: [{', '.join(model['enum'])}]"
    if "pattern" in model and not compiled(model["pattern"]).fullmatch(value):
        yield f"satisfy regular expression pattern: {model['pattern']}"


@functools.cache
def load(name: str) -> ServiceModel:
    """Return the model of a service, such as ``sagemaker``; it is read once per process.

    Raises:
        StandInError: botocore is not installed, or is too old to know the service.
    """
    try:
        from botocore.exceptions import UnknownServiceError
        from botocore.loaders import Loader
        from botocore.model import ServiceModel
    except ImportError:
        raise StandInError(
            "the stand-ins of AWS need packages that are not here; "
            "install diloco-localcloud with its extra: diloco-localcloud[aws]"
        ) from None
    try:
        return ServiceModel(Loader().load_service_model(name, "service-2"), name)
    except UnknownServiceError as wrong:
        raise StandInError(f"this version of botocore has no model of {name}: {wrong}") from None


# The characters that Java's dot does not match.
_DOT = r"[^\n\r\u0085\u2028\u2029]"
_POSIX = {"Alnum": "a-zA-Z0-9", "Alpha": "a-zA-Z", "Digit": "0-9", "ASCII": r"\x00-\x7f"}
_TOKEN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\.")


@functools.cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Return a pattern of a model, which is in Java's syntax, to be matched with ``fullmatch``."""
    ranges = re.sub(r"\\p\{(\w+)\}", lambda named: _ranges(named[1]), pattern)
    text = _TOKEN.sub(lambda token: _DOT if token[0] == "." else token[0], ranges)
    return re.compile(text, re.ASCII)


@functools.cache
def _ranges(name: str) -> str:
    """Return the characters of a class of Java's, as they are written between brackets."""
    if name in _POSIX:
        return _POSIX[name]
    points = (p for p in range(sys.maxunicode + 1) if unicodedata.category(chr(p))[0] == name)
    spans = itertools.groupby(enumerate(points), lambda item: item[1] - item[0])
    ends = [[point for _, point in span] for _, span in spans]
    return "".join(f"\\U{span[0]:08x}-\\U{span[-1]:08x}" for span in ends)
