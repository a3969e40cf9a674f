"""Texts for people to read.

Characters that would make a terminal or a log say something else are removed from texts of others.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
