"""Naming what a replica runs."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

from ._errors import InvalidRequestError

_NAME = r"[^\W\d]\w*"
_COLON = re.compile(rf"{_NAME}(\.{_NAME})*:{_NAME}(\.{_NAME})*")
_DOTTED = re.compile(rf"{_NAME}(\.{_NAME})+")


def entrypoint_name(entrypoint: str | Callable[..., Any]) -> str:
    """``"package.module:function"`` for an entrypoint.

    Args:
        entrypoint: That form, or ``"package.module.function"``, or ``"package.module"`` (whose ``main`` is called, unless the
            package has a function of that name: the replica finds out), or a function that an import can find again.

    Raises:
        InvalidRequestError: It is none of these, or a callable that cannot be named (lambda, nested, bound, of ``__main__``).
    """
    if isinstance(entrypoint, str):
        if _COLON.fullmatch(entrypoint):
            name = entrypoint
        elif _DOTTED.fullmatch(entrypoint):
            name = ":".join(entrypoint.rsplit(".", 1))
        else:
            raise InvalidRequestError(
                f"the entrypoint {entrypoint!r} is not of the form 'package.module:function' (or "
                "'package.module.function', or 'package.module', whose function main is called)"
            )
        if name.partition(":")[0] == "__main__":
            raise InvalidRequestError(
                f"{entrypoint!r} is in __main__, which is another program in the replica. {_ADVICE}"
            )
        return name
    return _name_of(entrypoint)


_ADVICE = (
    "Move the function into a module that the replica can import, and name it 'module:function'."
)


def _name_of(function: Callable[..., Any]) -> str:
    if not callable(function):
        raise InvalidRequestError(f"the entrypoint must be text or a function, not {function!r}")
    if isinstance(function, functools.partial):
        raise InvalidRequestError(
            f"a functools.partial cannot be named: pass its arguments as kwargs. {_ADVICE}"
        )
    if inspect.ismethod(function) and not inspect.isclass(function.__self__):
        raise InvalidRequestError(
            f"{function!r} is bound to an object, which another process does not have. {_ADVICE}"
        )
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name:
        raise InvalidRequestError(
            f"{function!r} has no name that another process could import. {_ADVICE}"
        )
    if "<lambda>" in name:
        raise InvalidRequestError(
            f"a lambda ({module}) cannot be imported by another process. {_ADVICE}"
        )
    if "<locals>" in name:
        raise InvalidRequestError(
            f"{name!r} ({module}) is defined inside a function and cannot be imported. {_ADVICE}"
        )
    if module in sys.modules and _look_up(module, name) != function:
        raise InvalidRequestError(
            f"{module}:{name} is not {function!r}: an import would find something else. {_ADVICE}"
        )
    return entrypoint_name(f"{module}:{name}")


def _look_up(module: str, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), sys.modules[module])
    except AttributeError:
        return None
