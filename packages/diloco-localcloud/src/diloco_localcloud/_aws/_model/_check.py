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
    if shape is None:
        return
    wrong = list(_violations(service, shape, request, ""))
    if wrong:
        s = "s" if len(wrong) > 1 else ""
        message = f"{len(wrong)} validation error{s} detected: {'; '.join(wrong)}"
        raise wrong_parameter(message) if service.name == "logs" else invalid(message)


def _violations(service: Service, shape: str, value: Any, path: str) -> Iterator[str]:
    model = service.shapes[shape]
    kind = model["type"]
    if not _is_a(value, kind):
        where = path or "the request"
        raise RefusedError(
            "SerializationException", f"{where} must be of type {kind}, not {_shown(value)}"
        )
    if kind == "map":
        yield from _map(service, model, value, path)
        return
    for constraint in _constraints(model, value):
        yield f"Value '{_shown(value)}' at '{path}' failed to satisfy constraint: {constraint}"
    if kind == "structure":
        for name in model.get("required", ()):
            if value.get(name) is None:
                where = _below(path, name)
                yield (
                    f"Value null at '{where}' failed to satisfy constraint: Member must not be null"
                )
        for name, member in model["members"].items():
            if value.get(name) is not None:
                yield from _violations(service, member["shape"], value[name], _below(path, name))
    elif kind == "list":
        for number, item in enumerate(value, 1):
            yield from _violations(
                service, model["member"]["shape"], item, f"{path}.{number}.member"
            )


def _is_a(value: object, kind: str) -> bool:
    if isinstance(value, int) and value.bit_length() > 63:
        return False  # no type of AWS holds it, and arithmetic would fail
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _map(service: Service, model: Json, value: Json, path: str) -> Iterator[str]:
    """Yield the violations of a map.

    If one key or value breaks a rule, AWS names the whole map, and all rules of its keys or values.
    """
    for constraint in _constraints(model, value):
        yield f"Value '{_shown(value)}' at '{path}' failed to satisfy constraint: {constraint}"
    for word, part, items in (
        ("keys", "key", value.keys()),
        ("value", "value", value.values()),
    ):
        of_part = service.shapes[model[part]["shape"]]
        for item in items:
            if not isinstance(item, _TYPES[of_part["type"]]):
                raise RefusedError(
                    "SerializationException", f"{path} must have text, not {_shown(item)}"
                )
        if any(next(_constraints(of_part, item), None) for item in items):
            rules = ", ".join(_rules(of_part))
            yield (
                f"Value '{_shown(value)}' at '{path}' failed to satisfy constraint: "
                f"Map {word} must satisfy constraint: [{rules}]"
            )


def _constraints(model: Json, value: Any) -> Iterator[str]:
    """Yield the rules of a shape that a value breaks."""
    kind = model["type"]
    size = value if kind in {"integer", "long", "float", "double"} else None
    if size is None and kind in {"string", "list", "map"}:
        size = len(value)
    if size is not None and (size > model.get("max", size) or size < model.get("min", size)):
        yield from _bounds(model, above=size > model.get("max", size))
    if kind == "string":
        if "enum" in model and value not in model["enum"]:
            yield _enum(model)
        if "pattern" in model and not compiled(model["pattern"]).fullmatch(value):
            yield _pattern(model)


def _rules(model: Json) -> Iterator[str]:
    """Yield all rules of a shape."""
    for above in (True, False):
        yield from _bounds(model, above=above)
    if "enum" in model:
        yield _enum(model)
    if "pattern" in model:
        yield _pattern(model)


def _bounds(model: Json, *, above: bool) -> Iterator[str]:
    bound = model.get("max" if above else "min")
    if bound is not None:
        what = "length" if model["type"] in {"string", "list", "map"} else "value"
        yield f"Member must have {what} {'less' if above else 'greater'} than or equal to {bound}"


def _enum(model: Json) -> str:
    return f"Member must satisfy enum value set: [{', '.join(model['enum'])}]"


def _pattern(model: Json) -> str:
    return f"Member must satisfy regular expression pattern: {model['pattern']}"


def _below(path: str, name: str) -> str:
    """Return the path of a member as AWS writes it: every name begins with a small letter."""
    name = name[:1].lower() + name[1:]
    return f"{path}.{name}" if path else name


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}={_shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_shown(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
