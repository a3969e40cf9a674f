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
    _refuse_file(entrypoint)
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


def _refuse_file(entrypoint: str) -> None:
    """Refuse an entrypoint that names a file.

    Only in the replica would it turn out that ``train.py`` means ``py`` in the module ``train``.
    """
    path, _, name = entrypoint.partition(":")
    folders = re.split(r"[/\\]", path.removesuffix(".py"))
    if len(folders) == 1 and not path.endswith(".py"):
        return
    parts = [part for part in folders if part not in {"", ".", ".."}]
    module = ".".join(parts if folders[0] else parts[-1:])
    name = name.lstrip(":")
    meant = f"{module}:{name or 'main'}"
    if not _COLON.fullmatch(meant):
        meant = "package.module:function"
    python = f"{path}.{name}" if name else f"{module}:py"
    also = f", or {python!r} if that is what Python calls it" if len(folders) == 1 else ""
    raise InvalidRequestError(
        f"the entrypoint {shown(entrypoint)} names a file, and a replica imports modules: write "
        f"{shown(meant)}{also}"
    )


_ADVICE = (
    "Move the function into a module that the replica can import, and name it 'module:function'."
)


def _name_of(function: Callable[..., Any]) -> str:
    if not callable(function):
        raise InvalidRequestError(
            f"the entrypoint must be text or a function, not {shown(function)}"
        )
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if (why := _why_not(function, module, name)) is not None:
        raise InvalidRequestError(f"{why}. {_ADVICE}")
    return f"{module}:{name}"


def _why_not(function: Callable[..., Any], module: str | None, name: str | None) -> str | None:
    """Say why another process could not import a function; None if it could."""
    if isinstance(function, functools.partial):
        return "a functools.partial cannot be named: pass its arguments as kwargs"
    if inspect.ismethod(function) and not inspect.isclass(function.__self__):
        return f"{shown(function)} is bound to an object, which another process does not have"
    if not module or not name:
        return f"{shown(function)} has no name that another process could import"
    if "<lambda>" in name:
        return f"a lambda ({module}) cannot be imported by another process"
    if "<locals>" in name:
        return f"{name!r} ({module}) is defined inside a function and cannot be imported"
    if module in sys.modules and _look_up(module, name) != function:
        return f"{module}:{name} is not {shown(function)}: an import would find something else"
    return None


def _look_up(module: str, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), sys.modules[module])
    except AttributeError:
        return None
