"""The check of a request against the service model, with AWS's messages for what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ._patterns import compiled
from ._refused import RefusedError, invalid, wrong_parameter

if TYPE_CHECKING:
    from botocore.model import ServiceModel, Shape


Json = dict[str, Any]

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "long": (int,),
    "float": (int, float),
    "double": (int, float),
    "boolean": (bool,),
    "timestamp": (int, float, str),
    "list": (list,),
    "map": (dict,),
    "structure": (dict,),
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
