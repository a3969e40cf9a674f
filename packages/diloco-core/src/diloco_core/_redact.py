"""URIs and messages without the passwords that may stand in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from urllib.parse import quote, unquote

from diloco_protocol.backend import REDACTED, redact_text

_PARAMETER = re.compile(r"(?<=[?&;])([^=&;#?\s]+)=([^&;#\s]*)")
_SECRET_NAME = re.compile(r"key|secret|token|pass|pwd|sig|credential|auth|sas", re.IGNORECASE)
# What people write who mean a URI, and who leave out a part of it.
_NEARLY = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:[/\\]*|[A-Za-z][A-Za-z0-9+.\-]*//|[/\\]{2,}")
_FOLDER = re.compile(r"/(?!/)|\.{1,2}/|~")
# Where a driver that does not know that a password holds it takes the password apart.
_PIECES = re.compile(r"[/?#@:]")
# Pages are linked to with fragments, and folders may have any name.
_WITH_FRAGMENTS = {"http", "https", "file"}
# A secret this short is also part of ordinary words, so it is only replaced on its own.
_SHORT = 6


def redact_uri(uri: str) -> str:
    """Return a URI as it may be shown.

    It is without user name and password, and without the values of secret query parameters.

    >>> redact_uri("s3://key:secret@bucket/run")
    's3://<redacted>@bucket/run'

    Where it is not certain what is a password (AWS secrets contain ``/``, and people forget to
    quote it), too much is hidden rather than too little. That goes for what is nearly a URI, too,
    such as ``s3:/key:secret@bucket``.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return _redact_nearly(uri)
    end = _userinfo_end(rest)
    if not end and rest.startswith("/") and scheme != "file":
        end = _userinfo_end(rest.lstrip("/")) and rest.rfind("@") + 1  # a slash too many
    if end:
        rest = f"{REDACTED}@{rest[end:]}"
    rest, number_sign, fragment = rest.partition("#")
    if fragment and scheme not in _WITH_FRAGMENTS:
        fragment = REDACTED
    return f"{scheme}://{_PARAMETER.sub(_mask_parameter, rest)}{number_sign}{fragment}"


def _redact_nearly(text: str) -> str:
    """Return what is no URI as it may be shown.

    It is taken for the path of a folder, unless it looks as if it held a password.
    """
    end = text.rfind("@") + 1
    if not end or _FOLDER.match(text):
        return text
    scheme = _NEARLY.match(text)
    if scheme is not None and scheme.end() < end:
        return f"{scheme[0]}{REDACTED}@{text[end:]}"
    return f"{REDACTED}@{text[end:]}" if ":" in text[:end] else text


def redact(text: str, *uris: str) -> str:
    """Return a message as it may be shown.

    It is without what has the form of a secret, and without the secrets of ``uris`` anywhere.

    Args:
        text: For instance what a driver says about an error. Drivers take URIs apart, and name the
            parts.
        *uris: The URIs, secrets included, that the message may be about.
    """
    for secret in sorted(_secrets(uris), key=len, reverse=True):
        pattern = re.escape(secret)
        text = re.sub(
            pattern if len(secret) >= _SHORT else rf"(?<!\w){pattern}(?!\w)", REDACTED, text
        )
    return redact_text(text)


def userinfo_of(rest: str) -> str:
    """User name and password of a URI whose scheme was taken away; empty where there are none."""
    return rest[: max(0, _userinfo_end(rest) - 1)]


def _userinfo_end(rest: str) -> int:
    """Return where the host begins in a URI without its scheme.

    That is behind user name and password, or 0 where there are none.
    """
    authority = rest.partition("/")[0]
    if ":" in authority.partition("@")[0]:
        return rest.rfind("@") + 1  # a password may hold any character
    return authority.rfind("@") + 1


def _mask_parameter(match: re.Match[str]) -> str:
    return f"{match[1]}={REDACTED}" if _SECRET_NAME.search(match[1]) else match[0]


def _secrets(uris: Iterable[str]) -> set[str]:
    plain = {secret for uri in uris for secret in _secrets_of(uri)}
    forms = {
        form
        for secret in plain
        for form in (secret, unquote(secret), quote(secret), quote(secret, safe=""))
    }
    # A text that was shown with repr() has some characters escaped.
    forms |= {repr(form)[1:-1] for form in forms}
    return {form for form in forms if form and form != REDACTED}


def _secrets_of(uri: str) -> Iterator[str]:
    _, separator, rest = uri.partition("://")
    if not separator:
        return
    end = _userinfo_end(rest)
    if end:
        userinfo = rest[: end - 1]
        yield userinfo
        _, colon, password = userinfo.partition(":")
        if colon:
            yield password
            yield from filter(None, _PIECES.split(password))
    for name, value in _PARAMETER.findall(rest):
        if _SECRET_NAME.search(name):
            yield value
