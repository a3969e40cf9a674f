"""Patterns of the service models, translated from Java's syntax to Python's."""

from __future__ import annotations

import functools
import re
import sys
import unicodedata

# The characters that Java's dot does not match.
_DOT = r"[^\n\r\u0085\u2028\u2029]"
_POSIX = {"Alnum": "a-zA-Z0-9", "Alpha": "a-zA-Z", "Digit": "0-9", "ASCII": r"\x00-\x7f"}


@functools.cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Return a compiled pattern, to be matched with ``fullmatch``.

    Raises:
        ValueError: the pattern uses a feature of Java's that is not translated.
    """
    try:
        return re.compile(translated(pattern), re.ASCII)
    except (re.error, LookupError) as wrong:
        raise ValueError(f"the pattern {pattern!r} cannot be translated: {wrong}") from None


def translated(pattern: str) -> str:
    """Return the pattern in Python syntax: Unicode classes become ranges, the dot stays Java's."""
    parts: list[str] = []
    place, inside = 0, False
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            named = re.match(r"\\p\{(\w+)\}", pattern[place:])
            if named:
                ranges = _ranges(named[1])
                parts.append(ranges if inside else f"[{ranges}]")
                place += named.end()
                continue
            parts.append(pattern[place : place + 2])
            place += 2
            continue
        if char == "[" and inside:
            parts.append(r"\[")  # Python reads it as a literal, too, but warns if it is not escaped
        elif char == "." and not inside:
            parts.append(_DOT)
        else:
            inside = char == "[" or (inside and char != "]")
            parts.append(char)
        place += 1
    return "".join(parts)


@functools.cache
def _ranges(name: str) -> str:
    """Return the characters of a class, as they are written between brackets."""
    if name in _POSIX:
        return _POSIX[name]
    if name not in {"L", "M", "N", "P", "S", "Z", "C"}:
        raise LookupError(f"there is no class {name}")
    spans: list[list[int]] = []
    for point in range(sys.maxunicode + 1):
        if unicodedata.category(chr(point))[0] == name:
            if spans and spans[-1][1] == point - 1:
                spans[-1][1] = point
            else:
                spans.append([point, point])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in spans)
