"""Removing users and passwords in front of hosts from texts, in URIs and elsewhere."""

from __future__ import annotations

import re

from ._secret_forms import REDACTED

# The length of a scheme is bounded, or a long text without one would take quadratic time. JSON may
# escape slashes.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]{0,30}):(?:\\{0,3}/){2,}")
_RUN = re.compile(r"[^\s'\"<>]*+")
_AUTHORITY = re.compile(r"[^/?#\s'\"<>]*+")
# An @ follows, but this is not a password: the port of a web server.
_PORT = re.compile(r"[^:@]*:[0-9]{1,5}")
# An @ could follow: user, colon, and a password that is more than a port; or text that is too long
# for the name of a host.
_MAY_END_LATER = re.compile(r"[^/?#:@]*+:(?![0-9]{1,5}(?:[/?#]|\Z))|[^/?#]{256}")
_WEB = frozenset({"http", "https", "ws", "wss"})
# A password may contain blanks and quotes, too; this is how far it is searched for.
_FURTHER = re.compile(r"(?:(?!://)[^@\r\n]){1,256}@(?=[\w\[])")
# "user:password@host" without a scheme, as in the names of images, in a path, or behind slashes
# alone; not "name:tag@sha256:...", and not "12:30:45@host", which is a time.
_ALONE = re.compile(
    r"(?:(?<![\w.+%\-/@:])|(?<=(?<![\w.+%\-/@:\\])//)|(?<=[^/\s:]/))(?!mailto:)"
    r"(?![\w.+%\-]{0,64}\d:\d\d:\d\d[.,\dZ]{0,10}@)"
    r"[\w.+%\-]{1,64}:(?!//|\\)[^ \t\r\n@\"'<>]{1,256}@(?!sha[0-9]{1,3}:)(?=[A-Za-z0-9\[/])"
)


def without_userinfo(text: str, *, cut: bool = False) -> str:
    """Return a text in which a mark replaces each user and password in front of a host.

    Where it is not certain which part is a password (those of AWS contain ``/``, and people forget
    to quote it), too much is left out rather than too little.

    Args:
        text: Anything.
        cut: Whether the text is the beginning of a longer one; then the @ behind a password may be
            missing.
    """
    if "@" not in text and not cut:
        return text
    pieces: list[str] = []
    done = run_end = 0
    last_at = -1
    for scheme in _SCHEME.finditer(text):
        start = scheme.end()
        if scheme.start() < done:
            continue  # inside a part that was left out
        if start >= run_end:  # several URIs may stand in one run of characters, which is read once
            run_end = _RUN.match(text, start).end()  # type: ignore[union-attr] # it always matches
            last_at = text.rfind("@", start, run_end)
        end = _userinfo_end(text, scheme, last_at)
        if cut and run_end == len(text) and _MAY_END_LATER.match(text, start):
            end = len(text)
        if end > start:
            pieces += [text[done:start], REDACTED]
            done = end
    return _ALONE.sub(f"{REDACTED}@", "".join([*pieces, text[done:]]))


def _userinfo_end(text: str, scheme: re.Match[str], last_at: int) -> int:
    """Return where the @ behind a user and a password is; -1 if there is none."""
    start = scheme.end()
    authority = _AUTHORITY.match(text, start)[0]  # type: ignore[index] # it always matches
    if ":" not in authority.partition("@")[0]:
        end = authority.rfind("@")
        return -1 if end < 0 else start + end
    port = _PORT.fullmatch(authority) is not None
    if last_at > start:
        return -1 if port and scheme[1] in _WEB else last_at
    further = None if port else _FURTHER.match(text, start)
    return -1 if further is None else further.end() - 1
