"""The forms that secrets have in texts.

Every pattern here takes time that is linear in the text, which may be a megabyte of anything: it begins where a name or a text
begins, and its repetitions are bounded, or are not tried again from a later place.
"""

from __future__ import annotations

import re
from functools import cache

REDACTED = "<redacted>"
"""What stands in place of a secret."""

TOKEN = re.compile(
    r"""(?<![A-Za-z0-9])(?:
        (?:AKIA|ASIA)[A-Z0-9]{16}                               # AWS
      | gh[opsur]_[A-Za-z0-9]{20,} | github_pat_[A-Za-z0-9_]{20,} | glpat-[A-Za-z0-9_-]{20,}
      | hf_[A-Za-z0-9]{20,} | sk-[A-Za-z0-9_-]{20,}             # Hugging Face; OpenAI and others
      | xox[abeoprs]-[A-Za-z0-9-]{10,} | xapp-[A-Za-z0-9-]{10,} # Slack
      | [rs]k_live_[A-Za-z0-9]{16,} | shpat_[a-f0-9]{20,}       # Stripe, Shopify
      | AIza[A-Za-z0-9_-]{35} | ya29\.[A-Za-z0-9_-]{20,}        # Google
      | npm_[A-Za-z0-9]{36} | pypi-[A-Za-z0-9_-]{50,} | dckr_pat_[A-Za-z0-9_-]{20,}
      | a[ks]-[A-Za-z0-9]{22}(?![A-Za-z0-9])                    # Modal
      | SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,} | dop_v1_[a-f0-9]{40,}
      | gsk_[A-Za-z0-9]{20,} | nvapi-[A-Za-z0-9_-]{20,} | r8_[A-Za-z0-9]{30,}
      | glsa_[A-Za-z0-9_]{20,} | hv[sb]\.[A-Za-z0-9_-]{20,} | tskey-[A-Za-z0-9-]{20,}
      | AGE-SECRET-KEY-1[A-Z0-9]{20,}
      | eyJ[A-Za-z0-9_-]{10,1000}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]* # JSON web tokens
    )
    | (?<=hooks\.slack\.com/services/)[A-Za-z0-9/]{8,}
    | (?<=/api/webhooks/)[0-9]{6,}/[A-Za-z0-9_-]{8,}
    | -----BEGIN\ [A-Z\ ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z\ ]*PRIVATE\ KEY-----|\Z)""",
    re.VERBOSE | re.DOTALL,
)
"""Tokens whose issuers begin them so that they can be found, addresses that are secret, and private keys."""

_NEW = rf"(?!{REDACTED})"  # what has been left out is not left out again
_NAME = r"(?<![\w.\-])(?P<name>[\w.\-]++)"
_OPTION = r"(?P<name>-{1,2}[A-Za-z][\w.\-]*+)"
_HEADER = (
    r"(?<![\w\-])(?P<name>(?:proxy-)?authorization|(?:set-)?cookie|api-key|x-[\w\-]{1,40})"
    r"[ \t]{0,4}+:[ \t]{0,4}+"
)
# A key in JSON, or in what Python makes of a dict; also if that has been quoted once more.
_KEY = r"(?P<around>\\{0,3}[\"'])(?P<name>[\w.\-]{1,64})(?P=around)"
# What has been cut off may lack its second quote.
_QUOTED = r"(?P<quote>[\"'])(?P<quoted>(?:\\.|(?!(?P=quote)).)*+)(?:(?P=quote)|\Z)"
# A value ends at a blank; at a quote that ends something; and at a separator before another name, or before nothing.
_BARE = (
    _NEW + r"(?P<bare>(?:[^\s,;&\"'\\]|[,;&](?!\s|\Z|[\w.\-%\[\]]{1,64}=)"
    r"|[\"'](?![\s,;:)\]}]|\Z)|\\(?![\"'nrt]))++)"
)
_LINE_END = r"(?=[ \t]*+$)"
# Without an end that fits a text that was cut off, this would read on from each quote to the end of the text.
_INSIDE = {quote: _NEW + rf"(?:\\.|[^{quote}\\])++(?={quote}|\\?\Z)" for quote in "\"'"}

# What stands before a secret, and the secret.
_FORMS: tuple[tuple[str, str], ...] = (
    # Authorization: Bearer x
    *((f"{quote}{_HEADER}", inside) for quote, inside in _INSIDE.items()),
    (_HEADER, rf"{_NEW}[^\s\"'][^\r\n]*+"),
    # ?sig=x
    (r"(?<=[?&;#])(?P<parameter>[^=&;#?\s]++)=", rf"{_NEW}[^&;#\s\"'<>\\]+"),
    # '--password=x y'
    *((f"{quote}{_OPTION}=", inside) for quote, inside in _INSIDE.items()),
    # password=x, password =x, password => x
    (rf"{_NAME}(?:=| = | =(?=[^\s=>])| => | := )", rf"(?:{_QUOTED}|{_BARE})"),
    # --password x
    (rf"(?<![\w.\-]){_OPTION}[ \t]{{1,8}}+", rf"(?:{_QUOTED}|(?!-){_BARE})"),
    # '--password', 'x'
    (rf"(?P<around>[\"']){_OPTION}(?P=around)\s{{0,4}}+,\s{{0,8}}+", _QUOTED),
    # password: x, as a whole line; and in a line what is no word, unlike "token: not found"
    (
        rf"^[ \t]{{0,40}}(?:-[ ])?{_NAME}:[ \t]{{1,8}}+",
        rf"(?:{_QUOTED}|{_NEW}(?P<bare>[^\s\"'|>{{\[]\S*+)){_LINE_END}",
    ),
    (rf"{_NAME}[ ]?:[ \t]{{0,8}}+", rf"(?=[^\s]{{6}})(?=[^\s]{{0,40}}[0-9]){_BARE}"),
    # ('password', 'x')
    (rf"[(\[]{_KEY},\s{{0,8}}+", rf"{_QUOTED}(?=[)\]])"),
    # "password": "x", "password": 1234
    (
        rf"{_KEY}\s{{0,8}}+:\s{{0,8}}+",
        r"(?:(?P<quote>\\{0,3}[\"'])(?P<quoted>(?:(?!(?P=quote))(?:\\.|.))*+)(?:(?P=quote)|\Z)"
        r"|(?P<bare>-?[0-9][0-9.eE+\-]*+))",
    ),
    # "name": "DB_PASS", "value": "x"
    (
        r"(?P<around>[\"'])(?:name|key)(?P=around):\s{0,8}+(?P=around)(?P<name>[\w.\-]{1,64})"
        r"(?P=around),\s{0,8}+(?P=around)value(?P=around):\s{0,8}+",
        _QUOTED,
    ),
    # Bearer x; what follows has a digit, or it is a word of a sentence
    (
        r"(?<![A-Za-z0-9])(?:Bearer|Basic) +",
        r"(?=[A-Za-z._~+/\-]{0,200}[0-9=])[A-Za-z0-9._~+/=\-]{6,}",
    ),
)


@cache
def forms() -> list[tuple[re.Pattern[str], re.Pattern[str]]]:
    """Return the forms: what stands before a secret, and what the secret is, to be looked for right behind that.

    If the first has a group "name" or "parameter", something is secret only if that is the name of a secret. The second may have
    the groups "quote", whose marks are no part of the secret, and "quoted" or "bare", what is within them.

    They are compiled when they are first used, since replicas rarely need them.
    """
    flags = re.IGNORECASE | re.MULTILINE | re.DOTALL
    return [(re.compile(before, flags), re.compile(secret, flags)) for before, secret in _FORMS]
