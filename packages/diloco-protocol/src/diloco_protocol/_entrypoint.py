"""Names of the functions that replicas run."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

from ._checks import shown
from ._errors import InvalidRequestError

_NAME = r"[^\W\d]\w*"
_COLON = re.compile(rf"{_NAME}(\.{_NAME})*:{_NAME}(\.{_NAME})*")
_DOTTED = re.compile(rf"{_NAME}(\.{_NAME})+")


def entrypoint_name(entrypoint: str | Callable[..., Any]) -> str:
    """Return the name of an entrypoint in the form ``"package.module:function"``.

    Args:
        entrypoint: A name in that form, or ``"package.module.function"``, or ``"package.module"``
            (whose ``main`` is called, unless the package has a function of that name, which only
            the replica can tell), or a function that an import can find again.

    Raises:
        InvalidRequestError: The entrypoint is none of these, or names a file (``train.py``), or is
            a callable that has no importable name (lambda, nested, bound, of ``__main__``).
    """
    if not isinstance(entrypoint, str):
        return _importable(_name_of(entrypoint))
    # Only in the replica would it turn out that "train.py" means "py" in the module "train".
    path = entrypoint.partition(":")[0]
    if path.endswith(".py") or re.search(r"[/\\]", path):
        raise InvalidRequestError(
            f"the entrypoint {shown(entrypoint)} names a file, and a replica imports modules: "
            "write 'package.module:function', with dots between the folders and without '.py'"
        )
    dotted = _DOTTED.fullmatch(entrypoint) is not None
    return _importable(":".join(entrypoint.rsplit(".", 1)) if dotted else entrypoint)


def _importable(name: str) -> str:
    if not _COLON.fullmatch(name):
        raise InvalidRequestError(
            f"the entrypoint {shown(name)} is not of the form 'package.module:function' (or "
            "'package.module.function', or 'package.module', whose function main is called)"
        )
    if name.partition(":")[0] == "__main__":
        raise InvalidRequestError(
            f"{shown(name)} is in __main__, which is another program in the replica. {_ADVICE}"
        )
    return name


_ADVICE = (
    "Move the function into a module that the replica can import, and name it 'module:function'."
)


def _name_of(function: Callable[..., Any]) -> str:
    if not callable(function):
        raise InvalidRequestError(
            f"the entrypoint must be text or a function, not {shown(function)}"
        )
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if isinstance(function, functools.partial):
        why = "pass the arguments of a functools.partial as kwargs"
    elif inspect.ismethod(function) and not inspect.isclass(function.__self__):
        why = "it is bound to an object, which another process does not have"
    elif not module or not name:
        why = "it has no name"
    elif "<lambda>" in name or "<locals>" in name:
        why = "it is a lambda, or defined inside a function"
    elif module in sys.modules and _look_up(module, name) != function:
        why = f"importing {module}:{name} would give something else"
    else:
        return f"{module}:{name}"
    raise InvalidRequestError(f"another process cannot import {shown(function)}: {why}. {_ADVICE}")


def _look_up(module: str, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), sys.modules[module])
    except AttributeError:
        return None
