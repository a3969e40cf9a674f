"""Find where a method is written and where an error comes from, to say whose line it is."""

from __future__ import annotations

import inspect
import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import diloco_protocol
from diloco_protocol import BaseExecutor

from ._harness import Harness
from ._promises import HarnessFault

#: Errors that a program raises by mistake; no platform answers with one of them.
MISTAKES = (ArithmeticError, AttributeError, LookupError, NameError, NotImplementedError, TypeError)

_NOT_THEIRS = tuple(
    os.path.realpath(place)
    for place in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        Path(__file__).parent,
        Path(diloco_protocol.__file__).parent,
    )
)


def fault(harness: object, text: str, method: str = "") -> NoReturn:
    """Raise that a harness is wrong, with the line where the method to be mended begins."""
    place = line_of(getattr(type(harness), method, None)) if method else ""
    raise HarnessFault(f"{type(harness).__name__}: {text}{place}")


def line_of(method: object) -> str:
    """Return where a method is written, as a line of a message; empty if that cannot be found."""
    code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
    if code is None:
        return ""
    return f"\n  {_shown(code.co_filename)}:{code.co_firstlineno}: {code.co_name}"


def raised_at(error: BaseException) -> str:
    """Return the innermost line of the author's own code that an error comes through, as text."""
    steps = [
        step for step in traceback.extract_tb(error.__traceback__) if _theirs(step.filename)
    ] or traceback.extract_tb(error.__traceback__)
    if not steps:
        return "somewhere"
    return f"{_shown(steps[-1].filename)}:{steps[-1].lineno}, in {steps[-1].name}"


def is_of_the_world(harness: Harness, error: BaseException) -> bool:
    """Say whether an error is a mistake in the harness or its parts, and not in the executor."""
    if not isinstance(error, MISTAKES):
        return False
    world = [harness, *vars(harness).values()]
    for frame in _frames(error):
        owner = frame.f_locals.get("self")
        if isinstance(owner, BaseExecutor):
            return False
        if any(owner is part for part in world):
            return True
    return False


def is_of_the_harness(harness: Harness, error: BaseException) -> bool:
    """Say whether an error comes out of a method of the harness in which no executor was asked."""
    owners = [frame.f_locals.get("self") for frame in _frames(error)]
    return any(owner is harness for owner in owners) and not any(
        isinstance(owner, BaseExecutor) for owner in owners
    )


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames of an error, from the innermost one outwards."""
    yield from reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)])


def _theirs(file: str) -> bool:
    return not file.startswith("<") and not os.path.realpath(file).startswith(_NOT_THEIRS)


def _shown(file: str) -> str:
    near = os.path.relpath(file)
    return file if near.startswith("..") else near
