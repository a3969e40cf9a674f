"""The forms that secrets have in texts.

Every pattern here takes time that is linear in the length of the text, which may be a megabyte of
anything: it begins where a name or a text begins, and its repetitions are bounded, or are not tried
again from a later place.
"""

from __future__ import annotations

import re
from functools import cache

REDACTED = "<redacted>"
"""The mark that replaces a secret."""

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
    # Of PEM, of PGP, and of SSH2 with its four dashes; of PuTTY
    | -{4,5}\ ?BEGIN\ [A-Z0-9\ \-]{0,64}PRIVATE\ KEY(?:\ BLOCK)?\ ?-{4}
      .*?(?:-{4}\ ?END\ [A-Z0-9\ \-]{0,64}PRIVATE\ KEY(?:\ BLOCK)?\ ?-{4,5}|\Z)
    | PuTTY-User-Key-File-[0-9]:.*?(?:Private-MAC:\ ?[0-9a-f]*|\Z)""",
    re.VERBOSE | re.DOTALL,
)
"""Tokens that begin with a mark of their issuer, secret addresses, and private keys."""

_NEW = rf"(?!{REDACTED})"  # a secret that has been replaced is not replaced again
# Blanks and line ends, also as Python and JSON write them in quotes.
_BLANK = r"(?:[ \t\xa0]|\\{1,7}(?:t|xa0|u00a0))"
_END = r"(?:\r?\n|(?:\\{1,7}r)?\\{1,7}n)"
_GAP = r"(?:\s|\\{1,7}[nrt])"
_BEGIN = r"(?:^|(?<=\\n))"
_LINE_END = r"(?=[ \t]*+(?:\\?\r?$|\\{1,7}[rn])|[ \t]{1,8}+#)"
_MARK = r"\\{0,7}[\"']"  # a quote, also if it has been quoted twice more
_NAME = r"(?<![\w.\-%])(?P<name>[\w.\-%]++)"
# A key in JSON, or in what Python makes of a dict.
_KEY = rf"(?P<around>{_MARK})(?P<name>[\w.\-]{{1,64}})(?P=around)"
_TERM = r"(?<![\w.\-])(?P<term>[\w.\-]++)[ ]?"
_OPTION = r"(?P<name>-{1,2}[A-Za-z][\w.\-]*+)"
_HEADER_NAME = r"(?P<name>(?:proxy-)?authorization|(?:set-)?cookie|api-key|x-[\w\-]{1,40})"
_HEADER = rf"{_HEADER_NAME}[ \t]{{0,4}}+:[ \t]{{0,4}}+"
# A header goes on in lines that begin with blanks, unless these are other names and values.
_FOLD = rf"{_END}{_BLANK}++(?![\w.\-]++:(?:{_GAP}|\Z))"
_EQUALS = r"(?:=>|[:+?]?=(?!=[ \t]))"
_UNSET = r"(?![\w.\-%\[\]]{1,64}=[^=\s])"  # not a setting
_ODD = r"(?=[^\s]{6})(?=[^\s]{0,40}[0-9])"  # not a word of a sentence
# A blank behind "=" alone may say that there is no value.
_IS = (
    rf"(?:{_BLANK}{{1,4}}+{_EQUALS}{_BLANK}{{0,4}}+"
    rf"|{_EQUALS}(?:{_BLANK}{{1,8}}+(?={_MARK}|{_ODD}{_UNSET}))?+)"
)
# A scheme of authorization is not a secret, but the word behind it is.
_SCHEME = (
    r"(?:(?:Basic|Bearer|Digest|DPoP|Negotiate|NTLM|OAuth|Token|(?:api|shared)-?key)"
    rf"{_BLANK}{{1,4}}+(?=[^\s])|"
    rf"(?-i:[A-Z])[A-Za-z\-]{{1,31}}+(?:{_BLANK}|{_END}){{1,4}}+{_ODD}){_UNSET}"
)
# A value ends at a blank; at a quote that ends something; and at a separator before another name,
# or before nothing.
_BARE = (
    rf"{_NEW}(?P<bare>(?:{_SCHEME})?+"
    r"(?:[^\s,;&\"'\\]|[,;&](?!\s|\Z|[\w.\-%\[\]]{1,64}=)"
    r"|[\"'](?![\s,;:)\]}]|\Z)|\\(?!\\{0,6}[\"'nrt\r\n]))++)"
)
_INSIDE_QUOTES = rf"(?P<quote>(?:\\{{0,7}}\"){{3}}|(?:\\{{0,7}}'){{3}}|{_MARK})"
# Two quotes inside are one, as in YAML, and not the end.
_INSIDE_QUOTES += (
    r"(?P<quoted>(?:(?:(?!(?P=quote))(?:\\.|.))++"
    r"(?:(?P=quote){2}(?:(?!(?P=quote))(?:\\.|.))*+)*+)?+)"
)
# A value that has been cut off may lack its second quote.
# The letters before the first one are Python's (b'x') or a shell's ($'x').
_QUOTED = rf"(?:[bruf$]{{1,2}}(?={_MARK}))?+{_INSIDE_QUOTES}(?:(?P=quote)|\Z)"
# A value that reaches the end of the text, after at least this many characters.
_CUT = r"\Z(?<=[^<>]{8192})"
_PLAIN = r"[^\[\]{}()]{0,200}+"
_FLAT = rf"[\[{{(]{_PLAIN}[\]}})]"
# A list or an object; its end is found by counting brackets.
_LIST = r"(?P<list>[\[{(])"
_SURE_LIST = (
    rf"(?=[\[{{(]\s{{0,8}}+(?:{_MARK}|[\[{{(]|[\w.\-]{{1,64}}+:\s)"
    rf"|[\[{{(](?:{_PLAIN}[\[{{(]|[^\[\]{{}}()]*+(?:[\]}})]|{_CUT}))){_LIST}"
)
_VALUE = rf"(?:{_QUOTED}|{_SURE_LIST}|{_BARE})"
# Without an end that also fits a text that was cut off, this would read from each quote to the end
# of the text.
_INSIDE = {
    quote: rf"{_NEW}(?:\\.|[^{quote}\\])++(?:{quote}{{2}}(?:\\.|[^{quote}\\])*+)*+(?={quote}|\\?\Z)"
    for quote in "\"'"
}
# Pairs of members in which one has the name of the value in the other, in JSON, YAML, or Python.
NAME_MEMBER = r"(?:(?:parameter|env|variable|var)?_?(?:name|key)|variable|var)"
VALUE_MEMBER = r"(?:parameter|env|variable|var)?_?(?:val|value)"
_MEMBER = rf"(?:(?<![\w.\-])|(?<=\\n))(?:%s)(?:{_MARK})?\s{{0,4}}+[:=]\s{{0,8}}+"
_NAMED = rf"{_MEMBER % NAME_MEMBER}(?:{_MARK})?(?P<name>[\w.\-]{{1,64}})"
_VALUED = _MEMBER % VALUE_MEMBER
_NEXT = rf"(?:{_MARK})?{_GAP}{{0,40}}+(?:,\s{{0,40}}+)?+(?:{_MARK})?"
# A few other members may stand between the two: texts, lists, and objects of objects.
_OTHER = (
    rf"{_MEMBER % '[a-z_]{1,32}'}"
    rf"(?>\"(?:\\.|\"\"|[^\"\\]){{0,400}}+\"|'(?:\\.|''|[^'\\]){{0,400}}+'"
    rf"|[\[{{(]{_PLAIN}(?:{_FLAT}{_PLAIN}){{0,4}}+[\]}})]"
    rf"|(?:{_MARK})?(?:(?![ \t]\w{{1,32}}=)[^\n,;&\"'\\{{}}\[\]]|{_MARK}(?=\w|{_MARK})){{0,100}}+)"
    rf"(?:{_GAP}{{1,40}}+-[ ][^\n\\]{{0,100}}+){{0,4}}+{_NEXT}"
)
_BETWEEN = rf"{_NEXT}(?:(?!{_VALUED}){_OTHER}){{0,4}}?"
_TAGS = rf"(?:{_BLANK}{{1,8}}+[!&][^\s\\]{{0,64}}+){{0,2}}+"  # of YAML: !!str, &anchor
# A key of YAML. The column before it says how far right the lines below it have to stand.
_LINE_KEY = (
    r"(?P<column>[ \t]{0,80}+(?:-[ ]){0,4}+)"
    rf"(?:{_MARK})?(?P<term>[\w.\-]++)(?:{_MARK})?:{_TAGS}"
)
# The rest of the key's line, and empty lines.
_LINES = rf"{_BLANK}{{0,8}}+(?:#[^\n\\]{{0,200}}+)?{_END}(?:[ \t]{{0,80}}+{_END}){{0,8}}+"

# The separators before the next item of a list, in YAML and in brackets; and an item without
# quotes.
_ITEM = rf"{_BLANK}{{0,8}}+(?:{_END}[ \t]{{0,80}}+){{1,3}}+-[ ]{{1,8}}+"
_COMMA = rf"\s{{0,4}}+,{_GAP}{{0,40}}+"
_BARE_ITEM = rf"{_NEW}(?P<bare>(?:{_SCHEME})?+[^\s,;&\"'\[\]{{}}\\]++)"
_ITEM_END = rf"(?:{_LINE_END}|(?={_MARK}(?!\w)))"
_OF_KEY = (
    "access|account|api|auth|encryption|master|private|secret|service|shared|signing|ssh|storage"
)

# Pairs of patterns: the text before a secret, and the secret.
_FORMS: tuple[tuple[str, str], ...] = (
    # Authorization: Bearer x
    *((f"{quote}{_HEADER}", inside) for quote, inside in _INSIDE.items()),
    *(
        (f"{begin}{_HEADER}", rf"(?:{_FOLD})?+{_NEW}(?=[^\s\"']){rest}++(?:{_FOLD}{rest}*+)*+")
        for begin, rest in (
            (r"(?<![\w\-])", r"[^\r\n]"),
            (r"(?<=\\n)", r"(?:[^\r\n\\]|\\(?!\\{0,6}[rn]))"),
        )
    ),
    # ?sig=x
    (r"(?:(?<=[?&;#])|(?<=u0026))(?P<parameter>[^=&;#?\s]{1,200}+)=", rf"{_NEW}[^&;#\s\"'<>\\]+"),
    # '--password=x y'
    *((f"{quote}{_OPTION}=", inside) for quote, inside in _INSIDE.items()),
    # password=x, password += x, password => x, password=['x']; env["password"] = x, 'password' => x
    *((rf"{name}(?:\[[0-9]{{0,6}}\]|\])?{_IS}", _VALUE) for name in (_NAME, _KEY)),
    # Account Key=x, API key: x
    (rf"(?<![\w.\-])(?P<term>(?:{_OF_KEY})[ ]keys?){_IS}", _VALUE),
    (
        rf"(?<![\w.\-])(?P<term>(?:{_OF_KEY})[ ]keys?):{_BLANK}{{1,8}}+",
        rf"(?:{_QUOTED}|{_ODD}{_BARE})",
    ),
    # --password x, also on a line of its own
    (rf"(?<![\w.\-]){_OPTION}{_BLANK}{{1,8}}+", rf"(?:{_QUOTED}|(?!-){_BARE})"),
    (
        rf"(?<![\w.\-]){_OPTION}{_BLANK}{{0,8}}+(?:\\(?=[\r\n]))?+{_END}[ \t]{{0,40}}+",
        rf"(?:{_QUOTED}|(?!-){_BARE}){_LINE_END}",
    ),
    # "--password" "x"
    (rf"(?P<around>{_MARK}){_OPTION}(?P=around){_BLANK}{{1,8}}+(?!{_MARK}-)", _QUOTED),
    # '--password', 'x'; [--password, x], and not "--password, which is"
    (
        rf"(?P<around>{_MARK})?+(?<![\w.\-]){_OPTION}(?(around)(?P=around)){_COMMA}(?!-)",
        rf"(?:{_QUOTED}|(?P<odd>{_ODD})?+{_BARE_ITEM}(?(odd)|(?=\s{{0,40}}+\]|{_COMMA}-)))",
    ),
    # - --password, and "- x" in the next line
    (
        rf"(?P<around>{_MARK})?+(?<![\w.\-]){_OPTION}(?(around)(?P=around)){_ITEM}(?!-)",
        rf"(?:{_QUOTED}|{_BARE}{_ITEM_END})",
    ),
    # -u user:x, of curl; not -u 1000:1000, of docker
    (
        rf"(?<![\w.\-])(?:-u|--(?:proxy-)?user)"
        rf"(?:=|[ \t]{{1,8}}+|(?:{_MARK})?(?:{_COMMA}|{_ITEM}))(?:{_MARK})?"
        r"(?![0-9]{1,9}:[0-9]{1,9}(?![^\s\"'\\]))[^\s:\"']{1,64}:",
        rf"{_NEW}(?P<bare>(?:[^\s,\"'\\]|,(?!\s|\Z))++)",
    ),
    # password: x, as a whole line; inside a line only if x is not a word, unlike "token: not found"
    # and "module.token:train1"
    (
        rf"{_BEGIN}{_LINE_KEY}{_BLANK}{{1,8}}+",
        rf"(?:{_QUOTED}|"
        rf"{_NEW}(?P<bare>[^\s\"'|>{{\[\\](?:[^\s\\]|\\(?!\\{{0,6}}[nrt]))*+)){_LINE_END}",
    ),
    (rf"{_TERM}:{_BLANK}{{1,8}}+", rf"(?:{_QUOTED}|(?=[\[{{]){_SURE_LIST})"),
    (rf"{_TERM}(?::|->){_TAGS}{_BLANK}{{1,8}}+", rf"{_ODD}{_BARE}"),
    (r"(?<![\w.\-])(?P<term>[\w\-]++):", rf"{_ODD}{_BARE}"),
    # password: |, and password: with lines below it that stand further to the right and are not a
    # sentence
    (
        rf"(?:{_BEGIN}|:[ ]|[\"']){_LINE_KEY}"
        rf"(?:{_BLANK}{{1,8}}+[|>][+\-0-9]{{0,2}}{_LINES}(?=[ \t])"
        rf"|{_LINES}(?=[ \t]{{0,80}}+(?:-[ ]|[\[{{]|{_MARK}|"
        rf"[\w.\-]{{1,64}}+:[\s\\]|[^\s\\\"']++(?:{_LINE_END}|{_MARK}(?!\w)))))",
        r"(?P<lines>)",
    ),
    # ('password', 'x'), [b"x-api-key", b"x"]
    (
        rf"[(\[]{_GAP}{{0,40}}+[bru]{{0,2}}{_KEY}{_COMMA}(?:[bru]{{1,2}}(?={_MARK}))?+",
        rf"{_QUOTED}(?={_GAP}{{0,40}}+[)\]]|\Z)",
    ),
    # [x-api-key, x]; the same in two lines of YAML
    (rf"\[\s{{0,8}}+{_HEADER_NAME}{_COMMA}", rf"{_NEW}[^,\[\]\r\n\"'\\]++(?=\])"),
    (
        rf"-[ ]{{1,8}}+-[ ]{{1,8}}+(?:{_MARK})?(?P<name>[\w.\-]{{1,64}})(?:{_MARK})?{_ITEM}",
        rf"(?:{_QUOTED}|{_NEW}(?P<bare>(?:[^\r\n\\\"']|\\(?!\\{{0,6}}[\"'nrt]))++))",
    ),
    # "password": "x", "password": 1234, "password": ["x"]
    (
        rf"{_KEY}\s{{0,8}}+:\s{{0,8}}+(?:[bru]{{1,2}}(?={_MARK}))?+",
        rf"(?:{_QUOTED}(?!\s{{0,4}}+:)|{_LIST}|(?P<bare>-?[0-9][0-9.eE+\-]*+))",
    ),
    # "name": "DB_PASS", "value": "x", and the other way round
    (_NAMED, rf"{_BETWEEN}{_VALUED}(?P<value>{_QUOTED}|{_BARE})"),
    (
        _VALUED,
        rf"(?:{_INSIDE_QUOTES}(?:(?P=quote)|(?P<cut>{_CUT}))"
        rf"|{_NEW}(?P<bare>[^\s,;&\"'\\]{{1,200}}+))"
        rf"(?(cut)|(?={_BETWEEN}{_NAMED}))",
    ),
    # <password>x</password>, whose end may have been cut off
    (
        rf"<(?P<name>[\w.:\-]{{1,64}})(?:\s[^<>]{{0,200}}+)?>(?:{_GAP}{{0,40}}+<!\[CDATA\[)?+",
        rf"(?:[^<>\]]|\](?!\]>))++(?:{_CUT}|(?=</|\]\]>))",
    ),
    # Bearer x; x has a digit, or it would be a word of a sentence; for Basic it is Base64
    (
        rf"(?<![A-Za-z0-9])(?:Bearer{_BLANK}{{1,4}}+"
        r"|Basic +(?=(?:[a-z0-9+/]{4})++(?:[a-z0-9+/]{2,3}={1,2})?(?![a-z0-9+/=])))",
        r"(?=[A-Za-z._~+/\-]{0,200}[0-9=])[A-Za-z0-9._~+/=\-]{6,}",
    ),
)


@cache
def forms() -> list[tuple[re.Pattern[str], re.Pattern[str]]]:
    """Return the forms of secrets: pairs of patterns.

    The first pattern matches the text before a secret, and the second matches the secret, right
    behind that text. If one of them has a group "name", "parameter" or "term", the match is secret
    only if this group is the name of a secret. The second may have the groups "quote", whose marks
    are not part of the secret, and "quoted" or "bare", the text within the quotes; "value" if
    something else stands before the secret; "list", where a list or an object begins; "lines" where
    the lines begin that are below a name at "column".

    The patterns are compiled when they are first used, since replicas rarely need them.
    """
    flags = re.IGNORECASE | re.MULTILINE | re.DOTALL
    return [(re.compile(before, flags), re.compile(secret, flags)) for before, secret in _FORMS]
