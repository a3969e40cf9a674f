"""Removing secrets from the exceptions that led to an error of ours.

Python prints the texts of these exceptions, which come from client libraries, above our error.
"""

from __future__ import annotations

import contextlib
import sys
from functools import lru_cache

from ._redact import redact_and_cut
from ._texts import readable

_LONGEST = 1 << 20  # characters of a text; the rest is ignored
_SHORT = 1000  # texts up to this length are cached together with what is shown of them
_BEGIN, _END = 12_000, 3_900  # what is shown of a long text: the problem, and what to do about it


def as_shown(text: str) -> str:
    """Return a text as a message may show it.

    Secrets and control characters are removed, and the middle of a long text is left out.
    """
    # A program that waits for an object asks for it again and again, and gets the same text each
    # time.
    return _shown_before(text) if len(text) <= _SHORT else _as_shown(text)


def _as_shown(text: str) -> str:
    text = readable(redact_and_cut(text, _LONGEST))
    return text if len(text) <= 16_000 else f"{text[:_BEGIN]} … {text[-_END:]}"


_shown_before = lru_cache(maxsize=256)(_as_shown)


def clean_causes() -> None:
    """Take secrets out of the texts of the exceptions that are being handled.

    One of our errors is about to be raised from them, and Python prints them with its traceback, as
    a logger does. They stay the same objects, of a type of the same name, with all their
    attributes. Exceptions without secrets are not touched.
    """
    seen: set[int] = set()
    links: list[BaseException | None] = [sys.exception()]
    while links:
        error = links.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        _clean(error)
        links += [error.__cause__, error.__context__]
        if isinstance(error, BaseExceptionGroup):
            links += error.exceptions


def _clean(error: BaseException) -> None:
    if notes := getattr(error, "__notes__", None):
        notes[:] = [as_shown(str(note)) for note in notes]
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - Python does not print it then either
        return
    shown = as_shown(text)
    if shown == text:
        return
    with contextlib.suppress(TypeError):  # built-in exceptions keep their type
        error.__class__ = _cleaned(type(error))  # type: ignore[arg-type] # it is hashable
        return
    error.args = tuple(as_shown(item) if isinstance(item, str) else item for item in error.args)
    if isinstance(error, OSError):
        for name in ("strerror", "filename", "filename2"):
            if isinstance(value := getattr(error, name), str):
                setattr(error, name, as_shown(value))


@lru_cache(maxsize=256)
def _cleaned(kind: type[BaseException]) -> type[BaseException]:
    """Return a subclass of the same name whose text shows no secret."""

    def text(self: BaseException) -> str:
        return as_shown(kind.__str__(self))

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__slots__": ()}
    return type(kind.__name__, (kind,), {**names, "__str__": text})
