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
_NAME = r"(?<![\w.\-%])(?P<name>[\w.\-%]++)"
_OPTION = r"(?P<name>-{1,2}[A-Za-z][\w.\-]*+)"
_HEADER = (
    r"(?<![\w\-])(?P<name>(?:proxy-)?authorization|(?:set-)?cookie|api-key|x-[\w\-]{1,40})"
    r"[ \t]{0,4}+:[ \t]{0,4}+"
)
_MARK = r"\\{0,3}[\"']"  # a quote, also if it has been quoted once more
# A key in JSON, or in what Python makes of a dict.
_KEY = rf"(?P<around>{_MARK})(?P<name>[\w.\-]{{1,64}})(?P=around)"
_INSIDE_QUOTES = rf"(?P<quote>{_MARK})(?P<quoted>(?:(?!(?P=quote))(?:\\.|.))*+)"
# What has been cut off may lack its second quote.
_QUOTED = rf"{_INSIDE_QUOTES}(?:(?P=quote)|\Z)"
# A value ends at a blank; at a quote that ends something; and at a separator before another name, or before nothing.
_BARE = (
    _NEW
    + r"(?P<bare>(?:(?:Bearer|Basic|Digest|Token) {1,4}+(?=[^\s]))?+(?:[^\s,;&\"'\\]|[,;&](?!\s|\Z|[\w.\-%\[\]]{1,64}=)"
    r"|[\"'](?![\s,;:)\]}]|\Z)|\\(?![\"'nrt]))++)"
)
_LIST = r"(?P<list>[\[{(])"  # a list or an object, of which the rest is looked for by counting
_LINE_END = r"(?=[ \t]*+$)"
# Without an end that fits a text that was cut off, this would read on from each quote to the end of the text.
_INSIDE = {quote: _NEW + rf"(?:\\.|[^{quote}\\])++(?={quote}|\\?\Z)" for quote in "\"'"}
# One of the two members that are a name and its value, in JSON, YAML, or the words of Python.
_MEMBER = rf"(?<![\w.\-])(?:%s)(?:{_MARK})?\s{{0,4}}+[:=]\s{{0,8}}+"
_NAMED = rf"{_MEMBER % '(?:parameter)?(?:name|key)'}(?:{_MARK})?(?P<name>[\w.\-]{{1,64}})"
_VALUE = _MEMBER % "(?:parameter)?value"
_NEXT = rf"(?:{_MARK})?\s{{0,40}}+(?:,\s{{0,40}}+)?+(?:{_MARK})?"
# A few other members may stand between them.
_OTHER = rf"{_MEMBER % '[a-z_]{1,32}'}(?:{_MARK})?(?:[^\n,;&\"'\\{{}}\[\]]{{0,100}}+){_NEXT}"
_BETWEEN = rf"{_NEXT}(?:(?!{_VALUE}){_OTHER}){{0,3}}?"

_YAML_KEY = rf"(?:^|:[ ])[ \t]{{0,40}}(?:-[ ])?(?:{_MARK})?(?P<term>[\w.\-]{{1,64}})(?:{_MARK})?:"

# What stands before a secret, and the secret.
_FORMS: tuple[tuple[str, str], ...] = (
    # Authorization: Bearer x
    *((f"{quote}{_HEADER}", inside) for quote, inside in _INSIDE.items()),
    (_HEADER, rf"{_NEW}[^\s\"'][^\r\n]*+"),
    # ?sig=x
    (r"(?<=[?&;#])(?P<parameter>[^=&;#?\s]++)=", rf"{_NEW}[^&;#\s\"'<>\\]+"),
    # '--password=x y'
    *((f"{quote}{_OPTION}=", inside) for quote, inside in _INSIDE.items()),
    # password=x, password = x, password => x, password=['x']
    (
        rf"{_NAME}(?:[ \t]{{1,4}}+(?:=>|:=|=)[ \t]{{0,4}}+|=>|:=|=)",
        rf"(?:{_QUOTED}|{_LIST}(?=\s{{0,8}}+[\"'\[{{(])|{_BARE})",
    ),
    # env["password"] = x, 'password' => x
    (
        rf"{_KEY}[ \t]{{0,4}}+\]?[ \t]{{0,4}}+(?:=>|:=|=(?!=))[ \t]{{0,4}}+",
        rf"(?:{_QUOTED}|{_LIST}(?=\s{{0,8}}+[\"'\[{{(])|{_BARE})",
    ),
    # --password x, also on a line of its own
    (rf"(?<![\w.\-]){_OPTION}[ \t]{{1,8}}+", rf"(?:{_QUOTED}|(?!-){_BARE})"),
    (
        rf"(?<![\w.\-]){_OPTION}[ \t]{{0,8}}+\r?\n[ \t]{{0,40}}+",
        rf"(?:{_QUOTED}|(?!-){_BARE}){_LINE_END}",
    ),
    # '--password', 'x'
    (rf"(?P<around>{_MARK}){_OPTION}(?P=around)\s{{0,4}}+,\s{{0,8}}+", _QUOTED),
    # -u user:x, of curl; not -u 1000:1000, of docker
    (
        r"(?<![\w.\-])(?:-u|--(?:proxy-)?user)(?:=|[ \t]{1,8}+|[\"']\s{0,4}+,\s{0,8}+)[\"']?"
        r"(?![0-9]{1,9}:[0-9]{1,9}(?![^\s\"']))[^\s:\"']{1,64}:",
        rf"{_NEW}[^\s\"']++",
    ),
    # password: x, as a whole line; and in a line what is no word, unlike "token: not found" and
    # "module.token:train1"
    (
        r"^[ \t]{0,40}(?:-[ ])?(?<![\w.\-])(?P<term>[\w.\-]++):[ \t]{1,8}+",
        rf"(?:{_QUOTED}|{_NEW}(?P<bare>[^\s\"'|>{{\[]\S*+)){_LINE_END}",
    ),
    (
        r"(?<![\w.\-])(?P<term>[\w\-]++(?=:\S)|[\w.\-]++(?=[ ]?:[ \t]))[ ]?:[ \t]{0,8}+",
        rf"(?=[^\s]{{6}})(?=[^\s]{{0,40}}[0-9]){_BARE}",
    ),
    # password: |, and password: with lines below it that stand further to the right
    (
        rf"{_YAML_KEY}[ \t]{{1,8}}+[|>][+\-0-9]{{0,2}}[ \t]{{0,8}}+\r?\n",
        r"(?P<deep>[ \t]{1,80}+)[^\s][^\r\n]*+(?:\r?\n(?:(?P=deep)[^\r\n]*+|[ \t]*+(?=\r?\n)))*+",
    ),
    (
        rf"{_YAML_KEY}[ \t]{{0,8}}+\r?\n[ \t]{{1,80}}+",
        rf"(?:{_QUOTED}|{_NEW}(?P<bare>(?!-[ ])[^\s\"'|>{{\[:][^\s:]*+)){_LINE_END}",
    ),
    # ('password', 'x')
    (rf"[(\[]{_KEY},\s{{0,8}}+", rf"{_QUOTED}(?=[)\]])"),
    # "password": "x", "password": 1234, "password": ["x"]
    (
        rf"{_KEY}\s{{0,8}}+:\s{{0,8}}+(?:[bru]{{1,2}}(?=[\"']))?+",
        rf"(?:{_QUOTED}|{_LIST}|(?P<bare>-?[0-9][0-9.eE+\-]*+))",
    ),
    # "name": "DB_PASS", "value": "x", and the other way round
    (_NAMED + _BETWEEN + _VALUE, rf"(?:{_QUOTED}|{_BARE})"),
    (
        _VALUE,
        rf"(?:{_INSIDE_QUOTES}(?P=quote)|{_NEW}(?P<bare>[^\s,;&\"'\\]{{1,200}}+))"
        rf"(?={_BETWEEN}{_NAMED})",
    ),
    # <password>x</password>
    (r"<(?P<name>[\w.\-]{1,64})(?:\s[^<>]{0,200}+)?>", r"[^<>]++(?=</)"),
    # Bearer x; what follows has a digit, or it is a word of a sentence; for Basic it is Base64
    (
        r"(?<![A-Za-z0-9])(?:Bearer +"
        r"|Basic +(?=(?:[a-z0-9+/]{4})++(?:[a-z0-9+/]{2,3}={1,2})?(?![a-z0-9+/=])))",
        r"(?=[A-Za-z._~+/\-]{0,200}[0-9=])[A-Za-z0-9._~+/=\-]{6,}",
    ),
)


@cache
def forms() -> list[tuple[re.Pattern[str], re.Pattern[str]]]:
    """Return the forms: what stands before a secret, and what the secret is, to be looked for right behind that.

    If one of them has a group "name", "parameter" or "term", something is secret only if that is the
    name of a secret. The second may have the groups "quote", whose marks are no part of the secret,
    and "quoted" or "bare", what is within them; or "list", where a list or an object begins.

    They are compiled when they are first used, since replicas rarely need them.
    """
    flags = re.IGNORECASE | re.MULTILINE | re.DOTALL
    return [(re.compile(before, flags), re.compile(secret, flags)) for before, secret in _FORMS]
