"""Texts for people: what others have written, without what makes a terminal or a log say something else."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._types import ReplicaStatus

# Control characters except newline and tab, the separators that are taken for line ends, what turns the direction of writing
# around, and halves of surrogate pairs, which nothing can print.
_UNREADABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def readable(text: str) -> str:
    r"""A text in which control characters other than newline and tab are shown as Python writes them.

    A replica chooses the text of its error, and a terminal does what the escape sequences in it say.

    >>> readable("\x1b[2Jall is well\r\n")
    '\\x1b[2Jall is well\n'
    """
    return _UNREADABLE.sub(lambda match: repr(match[0])[1:-1], text.replace("\r\n", "\n"))


def readable_status(status: ReplicaStatus) -> ReplicaStatus:
    """A status whose texts are all :func:`readable`."""
    message, native = readable(status.message), readable(status.native)
    signal = None if status.signal is None else readable(status.signal)
    url = None if status.url is None else readable(status.url)
    if (message, native, signal, url) == (status.message, status.native, status.signal, status.url):
        return status
    return replace(status, message=message, native=native, signal=signal, url=url)
