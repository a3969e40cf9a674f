"""Texts for people to read.

Characters that would make a terminal or a log say something else are removed from texts of others,
and secrets from messages of errors. Python prints the texts of the exceptions that led to an error
of ours, which come from client libraries, above it; so they are treated in the same way.
"""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ._redact import redact_and_cut

if TYPE_CHECKING:
    from ._types import ReplicaStatus


# Control characters except newline and tab, the separators that are taken for line ends, marks that
# reverse the direction of writing, and halves of surrogate pairs, which cannot be printed.
_UNREADABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u061c"
    "\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def readable(text: str) -> str:
    r"""Return a text with control characters other than newline and tab shown as Python does.

    A replica chooses the text of its error, and a terminal obeys the escape sequences in it.

    >>> readable("\x1b[2Jall is well\r\n")
    '\\x1b[2Jall is well\n'
    """
    return _UNREADABLE.sub(lambda match: repr(match[0])[1:-1], text.replace("\r\n", "\n"))


def readable_status(status: ReplicaStatus) -> ReplicaStatus:
    """Return a status whose texts are all :func:`readable`, and whose end is not before its start.

    The end could be before the start because clocks are set back, and differ between machines.
    """
    changed: dict[str, Any] = {
        name: shown
        for name in ("message", "native", "signal", "url")
        if (text := getattr(status, name)) is not None and (shown := readable(text)) != text
    }
    started, finished = status.started_at, status.finished_at
    if started is not None and finished is not None and finished < started:
        changed["finished_at"] = started
    return replace(status, **changed) if changed else status


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
