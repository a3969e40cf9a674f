"""The check of a request against the service model, with AWS's messages for what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ._patterns import compiled
from ._refused import RefusedError, invalid, wrong_parameter

if TYPE_CHECKING:
    from ._service import Service

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


def check(service: Service, operation: str, request: Json) -> None:
    """Check a request against the model: types, required members, lengths, ranges, patterns, enums.

    Members that the model does not have are ignored, as AWS ignores them.

    Raises:
        RefusedError: a ``ValidationException`` (for CloudWatch Logs an
            ``InvalidParameterException``) that lists everything that is wrong, or a
            ``SerializationException``.
    """
    shape = service.input(operation)
    wrong = [] if shape is None else list(_violations(service, shape, request, ""))
    if wrong:
        s = "s" if len(wrong) > 1 else ""
        message = f"{len(wrong)} validation error{s} detected: {'; '.join(wrong)}"
        raise wrong_parameter(message) if service.name == "logs" else invalid(message)


def _violations(service: Service, shape: str, value: Any, path: str) -> Iterator[str]:
    """Yield what is wrong with a value and its parts.

    Of a map AWS words it otherwise: it names the whole map, and all rules of its keys or values.
    """
    model = service.shapes[shape]
    kind = model["type"]
    if value is not None and not _is_a(value, kind):
        raise RefusedError(
            "SerializationException", f"{path or 'the request'} must be of type {kind}, not {value}"
        )
    for rule in _broken(model, value):
        shown = "null" if value is None else f"'{value}'"
        yield f"Value {shown} at '{path}' failed to satisfy constraint: Member must {rule}"
    for part, below, item in _parts(model, value):
        yield from _violations(service, below, item, f"{path}.{part}".lstrip("."))


def _is_a(value: object, kind: str) -> bool:
    if isinstance(value, int) and value.bit_length() > 63:
        return False  # no type of AWS holds it, and arithmetic would fail
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _parts(model: Json, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (name in a path, shape, value) of what a value consists of.

    A required member that is missing is among them, as None.
    """
    if model["type"] == "structure":
        for name, member in model["members"].items():
            if value.get(name) is not None or name in model.get("required", ()):
                yield name[:1].lower() + name[1:], member["shape"], value.get(name)
    elif model["type"] == "list":
        for number, item in enumerate(value, 1):
            yield f"{number}.member", model["member"]["shape"], item
    elif model["type"] == "map":
        for key, item in value.items():
            yield key, model["key"]["shape"], key
            yield key, model["value"]["shape"], item


def _broken(model: Json, value: Any) -> Iterator[str]:
    """Yield the rules of a shape that a value breaks."""
    kind = model["type"]
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
