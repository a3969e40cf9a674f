"""Check a request against botocore's model of the service before it is sent.

The client itself does not check most of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

from diloco_protocol import InvalidRequestError, MissingDependencyError
from diloco_protocol.backend import redact_json

_SHOWN = 60
_LISTED = 40  # names that a message lists
_USERINFO = re.compile("[a-z0-9]+://[^/]*[@:]")
# Characters of Unicode's category Z, for which Python's expressions have no class.
_SEPARATORS = r"\u0020\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
# Classes that Java's regular expressions have and Python's do not. Python's \w is letters, numbers
# and the underscore.
_JAVA = {r"\p{L}": r"\w", r"\p{N}": r"\w", r"\p{Z}": _SEPARATORS, r"\p{Alnum}": "a-zA-Z0-9"}


def check_request(request: Mapping[str, Any], shape: str = "CreateTrainingJobRequest") -> None:
    """Refuse a request that the service would refuse because of its form.

    Raises:
        InvalidRequestError: Names the first value that is wrong, and what is allowed.
    """
    for problem in problems(request, shape):
        raise InvalidRequestError(problem)


def problems(value: Any, shape: str, path: str = "") -> Iterator[str]:
    """Yield what is wrong with a value, in sentences; nothing if it has the form of the model."""
    model = _shapes()[shape]
    kind = model["type"]
    name = path or shape
    check = {
        "structure": _structure,
        "map": _map,
        "list": _list,
        "string": _string,
        "integer": _number,
        "long": _number,
        "boolean": _boolean,
    }.get(kind)
    if check is not None:
        yield from check(value, model, name, path)


def instance_types() -> frozenset[str]:
    """Return the instance types for training that this version of botocore knows."""
    return frozenset(_shapes()["TrainingInstanceType"]["enum"])


def some_of(known: Collection[str], name: object) -> str:
    """Return the allowed names, for a message; of many, only those nearest to the one given."""
    names = sorted(known)
    if len(names) <= _LISTED:
        return ", ".join(names)
    nearest = get_close_matches(str(name), names, n=5, cutoff=0.0)
    return f"{len(names)}, of which the nearest are {', '.join(nearest)}"


def to_python(pattern: str) -> str:
    """Translate a regular expression of the model, which is one of Java's, into one of Python's."""
    for java, python in _JAVA.items():
        pattern = pattern.replace(java, python)
    return pattern


def missing_boto3(error: ImportError) -> MissingDependencyError:
    """Return the error for an installation without boto3."""
    return MissingDependencyError(f"{error}: run `pip install boto3`")


@cache
def _shapes() -> dict[str, Any]:
    try:
        from botocore.loaders import Loader  # slow to import
    except ImportError as error:
        raise missing_boto3(error) from error
    shapes: dict[str, Any] = Loader().load_service_model("sagemaker", "service-2")["shapes"]
    return shapes


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(to_python(pattern))


def _structure(value: Any, model: Any, name: str, path: str) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"{name} must be a mapping, not {_show(value, name)}"
        return
    members = model["members"]
    for missing in [key for key in model.get("required", ()) if key not in value]:
        yield f"{name} lacks {missing}"
    for key, inner in value.items():
        if key not in members:
            yield (
                f"{name} has no {key!r} in this version of botocore; it has "
                f"{', '.join(sorted(members))}"
            )
        else:
            yield from problems(inner, members[key]["shape"], f"{path}.{key}" if path else key)


def _map(value: Any, model: Any, name: str, path: str) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"{name} must be a mapping, not {_show(value, name)}"
        return
    yield from _amount(len(value), model, name, "entries")
    for key, inner in value.items():
        yield from problems(key, model["key"]["shape"], f"the key {_show(key, path)} of {path}")
        yield from problems(inner, model["value"]["shape"], f"{path}[{key!r}]")


def _list(value: Any, model: Any, name: str, path: str) -> Iterator[str]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        yield f"{name} must be a list, not {_show(value, name)}"
        return
    yield from _amount(len(value), model, name, "items")
    for number, inner in enumerate(value):
        yield from problems(inner, model["member"]["shape"], f"{path}[{number}]")


def _string(value: Any, model: Any, name: str, path: str) -> Iterator[str]:
    if not isinstance(value, str):
        yield f"{name} must be text, not {_show(value, name)}"
        return
    yield from _amount(len(value), model, name, "characters")
    if "enum" in model and value not in model["enum"]:
        known = some_of(model["enum"], value)
        yield (
            f"{name} is {_show(value, name)}, which this version of botocore does not know; it "
            f"knows {known}"
        )
    if path.endswith(("Uri", "Path")) and _USERINFO.match(value):
        yield f"{name} may hold no user and no password: only a bucket stands before its path"
        return
    pattern = model.get("pattern")
    if pattern is not None and not _compiled(pattern).fullmatch(value):
        yield f"{name} is {_show(value, name)}, which must match {pattern}"


def _number(value: Any, model: Any, name: str, path: str) -> Iterator[str]:  # noqa: ARG001
    if type(value) is not int:
        yield f"{name} must be a whole number, not {_show(value, name)}"
        return
    least, most = model.get("min"), model.get("max")
    if (least is not None and value < least) or (most is not None and value > most):
        yield f"{name} is {value}, and must be from {least} to {most}"


def _boolean(value: Any, model: Any, name: str, path: str) -> Iterator[str]:  # noqa: ARG001
    if not isinstance(value, bool):
        yield f"{name} must be True or False, not {_show(value, name)}"


def _amount(amount: int, model: Any, name: str, what: str) -> Iterator[str]:
    least, most = model.get("min"), model.get("max")
    if most is not None and amount > most:
        yield f"{name} has {amount} {what}, and may have at most {most}"
    if least is not None and amount < least:
        yield f"{name} has {amount} {what}, and must have at least {least}"


def _show(value: Any, name: str) -> str:
    """Return a value as an error may show it.

    Values of variables, hyperparameters and tags are not shown, since they may be secrets.
    """
    if name.endswith(("']", '"]', ".Value")):
        return "a value that is not shown"
    text = repr(redact_json(value, name))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
