"""Checking that a user's JSON or YAML has the types in a table."""

from __future__ import annotations

from typing import Any

_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a mapping",
}


def misfit(value: Any, schema: Any, path: str) -> str | None:
    """Return which part has a wrong type first; None if all types are right.

    The text is such as ``users[0].name must be text, not a whole number``. It contains no value,
    which may be a secret.

    Args:
        value: Anything.
        schema: A type; or a list with the schema of every item; or a mapping with the schema of
            every field, or with ``str`` and the schema of every value. Values may be None, and
            fields may be missing, except for those that end with ``!``. Other fields are not
            checked.
        path: Name of the value.
    """
    wanted = schema if isinstance(schema, type) else type(schema)
    kind = type(value)
    if kind is not wanted:
        type_name = "nothing" if value is None else _WORDS.get(kind, f"a {kind.__name__}")
        return f"{path} must be {_WORDS[wanted]}, not {type_name}"
    inside: list[tuple[Any, Any, str]] = []
    if isinstance(schema, list):
        inside += [(item, schema[0], f"{path}[{number}]") for number, item in enumerate(value)]
    elif isinstance(schema, dict) and str in schema:
        inside += [(key, str, f"a key of {path}") for key in value]
        inside += [
            (item, schema[str], f"{path}.{key}") for key, item in value.items() if item is not None
        ]
    elif isinstance(schema, dict):
        for field, inner in schema.items():
            name = field.rstrip("!")
            if field != name or value.get(name) is not None:
                inside.append((value.get(name), inner, f"{path}.{name}"))
    return next(filter(None, (misfit(*part) for part in inside)), None)
