"""Keeping secrets out of what is shown: by the name of a value, and by its form."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._spec import ReplicaSpec

REDACTED = "<redacted>"
"""What stands in place of a secret."""

# "token" is also the beginning of words that every trainer of language models uses.
_SECRET_NAME = re.compile(
    r"TOKEN(?!I[SZ])|SECRET|PASSW|PWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE|AUTHORIZATION",
    re.IGNORECASE,
)
# The length of a scheme is bounded, or a long text without one would take quadratic time.
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]{0,30}://)([^\s'\"<>]+)")
_PARAMETER = re.compile(r"(?<=[?&;])([^=&;#?\s]+)=([^&;#\s]+)")
_SECRET_PARAMETER = re.compile(r"key|secret|token|pass|pwd|sig|credential|auth|sas", re.IGNORECASE)
# Tokens whose issuers begin them so that they can be found: AWS, GitHub, GitLab, Hugging Face, OpenAI and others who begin with
# "sk-", Slack, Stripe, Google, npm, PyPI, JSON web tokens; and private keys.
_TOKEN = re.compile(
    r"""(?<![A-Za-z0-9])(?:
        (?:AKIA|ASIA)[A-Z0-9]{16} |
        gh[opsur]_[A-Za-z0-9]{20,} | github_pat_[A-Za-z0-9_]{20,} | glpat-[A-Za-z0-9_-]{20,} |
        hf_[A-Za-z0-9]{20,} | sk-[A-Za-z0-9_-]{20,} | xox[abeoprs]-[A-Za-z0-9-]{10,} |
        [rs]k_live_[A-Za-z0-9]{16,} | AIza[A-Za-z0-9_-]{35} | npm_[A-Za-z0-9]{36} | pypi-[A-Za-z0-9_-]{50,} |
        eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*
    ) | -----BEGIN\ [A-Z\ ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z\ ]*PRIVATE\ KEY-----|\Z)""",
    re.VERBOSE | re.DOTALL,
)


def redact(name: str, value: str) -> str:
    """The value of a variable as a plan may show it.

    Args:
        name: Its name. If that looks like the name of a secret, the value is ``"<redacted>"``.
        value: Its value, of which secrets are left out that :func:`redact_text` finds.
    """
    return REDACTED if value and _SECRET_NAME.search(name) else redact_text(value)


def redact_text(text: str) -> str:
    """A text without what has the form of a secret: users and passwords in URIs, their secret parameters, known kinds of tokens.

    >>> redact_text("from s3://key:secret@bucket/run")
    'from s3://<redacted>@bucket/run'
    """
    return _TOKEN.sub(REDACTED, _URI.sub(_without_userinfo, text))


def redact_json(value: Any, name: str = "") -> Any:
    """A copy of a JSON value in which every text is redacted, by the names of the keys above it and by its form."""
    if isinstance(value, str):
        return redact(name, value)
    if isinstance(value, dict):
        secret = name if _SECRET_NAME.search(name) else ""
        return {key: redact_json(inside, secret or key) for key, inside in value.items()}
    if isinstance(value, list):
        return [redact_json(inside, name) for inside in value]
    return value


def redact_spec(spec: ReplicaSpec) -> ReplicaSpec:
    """A spec as a plan may show it: its arguments and its rendezvous without secrets."""
    uri = spec.rendezvous_uri
    return replace(
        spec,
        kwargs=redact_json(spec.kwargs),
        rendezvous_uri=None if uri is None else redact_text(uri),
    )


def _without_userinfo(match: re.Match[str]) -> str:
    scheme, rest = match.groups()
    authority = rest.partition("/")[0]
    # A password may hold any character, also one that should have been quoted.
    end = (rest if ":" in authority.partition("@")[0] else authority).rfind("@")
    if end >= 0:
        rest = f"{REDACTED}{rest[end:]}"
    return scheme + _PARAMETER.sub(_without_value, rest)


def _without_value(match: re.Match[str]) -> str:
    return f"{match[1]}={REDACTED}" if _SECRET_PARAMETER.search(match[1]) else match[0]
