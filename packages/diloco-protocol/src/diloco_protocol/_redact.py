"""Removing secrets from texts and values that are shown, by name and by form."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ._secret_forms import NAME_MEMBER, REDACTED, TOKEN, VALUE_MEMBER, forms
from ._secret_names import (
    is_count,
    is_folder,
    is_secret_name,
    is_secret_parameter,
    is_secret_reference,
    is_secret_term,
)
from ._userinfo import without_userinfo

if TYPE_CHECKING:
    from collections.abc import Sequence

_SETTING = re.compile(r"(-{0,2}[A-Za-z_][\w.\-]*+)=")
_OPTION = re.compile(r"-{1,2}[A-Za-z][\w.\-]*")
_HEADER = re.compile(r"([A-Za-z][\w.\-]{0,63}):?")
_BELOW = "secret"  # the name of everything that is nested below the name of a secret
_BRACKET = re.compile(
    r"""(?P<open>[\[({])|(?P<close>[\])}])|\\.|"(?:\\.|[^"\\])*+"?|'(?:\\.|[^'\\])*+'?""",
    re.DOTALL,
)
# A line of YAML; its end may also be written as Python and JSON write it in quotes.
_LINE = re.compile(
    r"(?P<lead>[ \t]*+(?:-[ ]++)*+)"
    r"(?P<key>[\"']?(?P<name>[\w.\-]{1,64}+)[\"']?:(?=[\s\\]|\Z)[ \t]*+)?+"
    r"(?P<value>(?:\"(?:\\.|[^\"\\\n])*+\"(?=[\s\\]|\Z))?+"
    r"(?:[^\\\n]++|\\(?!\\{0,6}n))*+)(?:\n|\\{1,7}n|\Z)"
)
_NAME_MEMBER, _VALUE_MEMBER = (
    re.compile(form, re.IGNORECASE) for form in (NAME_MEMBER, VALUE_MEMBER)
)
# Values that are too common to be secrets.
_NOTHING = frozenset({"", "0", "1", "false", "none", "null", "true"})
# Colours of a terminal may stand between a name and its value; also as Python and JSON write them.
_COLOURS = re.compile(r"(?:\x1b|\\{1,7}(?:x1b|u001b|033))\[[0-9;]{0,40}m")
_LONGEST_JSON = 1 << 20
_KEPT = "surrogateescape"  # bytes that are not UTF-8 stay as they are
# The number of characters behind the end of a cut text in which the form of a secret may still end:
# tokens have a few thousand.
_BEYOND = 16384


def redact(name: str, value: str) -> str:
    """Return the value of a variable as a plan may show it.

    Args:
        name: Name of the variable. If it looks like the name of a secret, the value is
            ``"<redacted>"``.
        value: The value, from which the secrets that :func:`redact_text` finds are removed.
    """
    if is_secret_name(name) and not _is_shown(name, value):
        return REDACTED
    setting = _SETTING.match(value)
    if (
        setting is not None
        and is_secret_name(setting[1])
        and not _is_shown(setting[1], value[setting.end() :])
    ):
        return f"{setting[0]}{REDACTED}"
    if len(value) <= _LONGEST_JSON and value.lstrip()[:1] in {"{", "["}:
        value = _redact_encoded(value) or value
    return redact_text(value)


def redact_text(text: str) -> str:
    """Return a text without the parts that have the form of a secret.

    These are users and passwords in front of hosts, secret parameters and settings
    (``password=...``), options of commands (``--token ...``), headers, members of JSON with the
    names of secrets, and the tokens of known issuers.

    >>> redact_text("from s3://key:secret@bucket/run with --password=hunter2")
    'from s3://<redacted>@bucket/run with --password=<redacted>'
    """
    return _redact_text(text, cut=False)


def redact_and_cut(text: str, most: int) -> str:
    """Return the beginning of a text without secrets, with a mark if anything was cut off.

    Secrets are removed first, because the part that is cut off may be what completes the form of a
    secret.

    Args:
        text: Text from any source, of any length.
        most: Number of characters to keep.
    """
    cut = len(text) > most + _BEYOND
    begin = _redact_text(text[: most + _BEYOND], cut=cut)
    return begin if len(begin) <= most and not cut else f"{begin[:most]}…"


def redact_ends(text: str, room: int) -> tuple[str, str]:
    """Return the first and the last ``room`` characters of a text without secrets.

    Secrets that lie across a cut are removed too.
    """
    most = room + _BEYOND
    cut = len(text) > most
    return (
        _redact_text(text[:most], cut=cut)[:room],
        _redact_text(text[-most:], cut=False)[-room:] if room else "",
    )


def _redact_text(text: str, *, cut: bool) -> str:
    plain = _COLOURS.sub("", text)
    shown = TOKEN.sub(REDACTED, without_userinfo(plain, cut=cut))
    for before, secret in forms():
        shown = _without(before, secret, shown)
    return text if shown == plain else shown


def redact_json(value: Any, name: str = "") -> Any:
    """Return a copy of a JSON value in which every text is redacted, by its names and by its form.

    The names of a text are those of the keys above it, of the ``name`` or ``key`` beside a
    ``value``, and of the option before it in a command.
    """
    secret = is_secret_name(name)
    if isinstance(value, str):
        return redact(name, value)
    if isinstance(value, bytes):  # not in JSON, but in values that are refused because of it
        return redact(name, value.decode(errors=_KEPT)).encode(errors=_KEPT)
    if isinstance(value, dict):
        return _redact_members(value, _BELOW if secret else "")
    if isinstance(value, (list, tuple)):
        names = _names_of_items(value, name)
        shown = [redact_json(inside, of) for inside, of in zip(value, names, strict=True)]
        for number, (option, item) in enumerate(pairwise(value), start=1):
            # Some options are recognised by their value: -u user:password
            if _is_option(option) and isinstance(item, str) and shown[number] == item:
                shown[number] = redact_text(f"{option} {item}").partition(" ")[2]
        return type(value)(shown)
    is_shown = not secret or value is None or value in (0, 1) or _counts(name, value)
    return value if is_shown else REDACTED


def _is_option(value: Any) -> bool:
    return isinstance(value, str) and _OPTION.fullmatch(value) is not None


def _names_of_items(items: Sequence[Any], name: str) -> list[str]:
    """Return the name under which each item of a list is redacted, from those before it.

    It is found first, so that no item is redacted twice: nested lists would be read 2^depth times.
    """
    names = [name][: len(items)]
    for option, item in pairwise(items):
        if isinstance(option, str) and option.endswith(":") and is_secret_name(_header(option)):
            name = _header(option)  # of all that follows
        another = isinstance(item, str) and item.startswith("--")
        is_named = _is_option(option) and not another and is_secret_name(option)
        names.append(option if is_named else name)
    if len(items) == 2 and is_secret_name(header := _header(items[0])):  # a name and its value
        names[1] = header
    return names


def redacted_repr(value: Any) -> str:
    """Return the ``repr`` of a dataclass that may hold secrets."""
    shown = {item.name: redact_json(getattr(value, item.name), item.name) for item in fields(value)}
    return (
        f"{type(value).__name__}({', '.join(f'{name}={each!r}' for name, each in shown.items())})"
    )


def _header(value: object) -> str:
    """Return the name of a header, which clients keep beside its value; empty if it is not one."""
    text = value.decode(errors=_KEPT) if isinstance(value, bytes) else value
    match = _HEADER.fullmatch(text) if isinstance(text, str) else None
    return match[1] if match else ""


def _redact_members(members: dict[str, Any], secret: str) -> dict[str, Any]:
    keys = [key for key in members if type(key) is str]
    names = [members[key] for key in keys if _NAME_MEMBER.fullmatch(key)]
    called = [name for name in names if isinstance(name, str) and is_secret_name(name)]
    shown = {}
    for key, inside in members.items():
        if type(key) is not str:
            shown[key] = redact_json(inside, secret)
            continue
        above = key if is_secret_reference(key) else secret or key
        name = called[0] if called and _VALUE_MEMBER.fullmatch(key) else above
        shown[redact_text(key)] = redact_json(inside, name)
    return shown


def _without(before: re.Pattern[str], secret: re.Pattern[str], text: str) -> str:
    """Return a text without the secrets that have one form."""
    pieces: list[str] = []
    done = place = 0
    while (named := before.search(text, place)) is not None:
        place = named.end()
        # A value is only read if its name is that of a secret: it may contain other names, and
        # would be read again for each of them.
        if not _names_a_secret(named) or (match := secret.match(text, place)) is None:
            continue
        groups, end = named.groupdict() | match.groupdict(), match.end()
        name = groups.get("name") or groups.get("term") or ""
        value = groups.get("quoted") or groups.get("bare")
        if groups.get("bare"):
            value = _without_brackets(groups["bare"])
            end = match.start("bare") + len(value)
        if not _names_a_secret(match) or (value is not None and _is_shown(name, value)):
            continue
        quote, shown = groups.get("quote") or "", REDACTED
        if groups.get("list"):
            end = _end_of_list(text, place)
            shown = _redact_encoded(text[place:end], name) or REDACTED
        elif "lines" in groups:
            shown, end = _redact_lines(text, place, len(groups["column"]), name)
        begin = match.start("value") if "value" in groups else place
        pieces += [text[done:begin], quote, shown, quote]
        done = place = end
    return "".join([*pieces, text[done:]])


def _without_brackets(value: str) -> str:
    """Return a value without the closing brackets at its end that were opened before it.

    The punctuation that follows these brackets at the end of a sentence is left out too.
    """
    more = {
        close: value.count(close) - value.count(opening) for opening, close in ("()", "[]", "{}")
    }
    end = last = len(value.rstrip(".:"))
    while end and more.get(value[end - 1], 0) > 0:
        end -= 1
        more[value[end]] -= 1
    return value[:end] if end < last else value


def _end_of_list(text: str, start: int) -> int:
    """Return where the list or object that begins at ``start`` ends.

    If it was cut off, that is the end of the text.
    """
    depth = 0
    for mark in _BRACKET.finditer(text, start):
        depth += (mark.lastgroup == "open") - (mark.lastgroup == "close")
        if depth == 0:
            return mark.end()
    return len(text)


def _redact_encoded(text: str, name: str = "") -> str | None:
    """Return a text that is JSON as :func:`redact_json` shows it; None if it is not JSON.

    If nothing is redacted, the text stays as it is.
    """
    try:
        data = json.loads(text)
        shown = redact_json(data, name)
    except (ValueError, RecursionError):
        return None
    return text if shown == data else json.dumps(shown)


def _redact_lines(text: str, start: int, column: int, name: str) -> tuple[str, int]:
    """Return the lines of YAML below the name of a secret, redacted, and where they end.

    Only values that say where a secret is kept are shown.
    """
    pieces: list[str] = []
    first, end = None, start
    for line in _LINE.finditer(text, start):
        lead, key, value = line["lead"], line["key"] or "", line["value"].rstrip()
        dashes = lead.lstrip(" \t")
        place = len(lead) - len(dashes)
        if not (dashes or key or value):
            continue
        first = place if first is None else first
        if place < max(first, column) or (place == column and not dashes):
            break
        shown = is_secret_reference(line["name"] or "") or _is_shown(_BELOW if key else name, value)
        pieces += [text[end : line.start("value")], value if shown else REDACTED]
        end = line.start("value") + len(value)
    return "".join(pieces), end


def _names_a_secret(match: re.Match[str]) -> bool:
    groups = match.groupdict()
    if "parameter" in groups:
        return is_secret_parameter(groups["parameter"])
    if "term" in groups:
        return is_secret_term(groups["term"])
    return groups.get("name") is None or is_secret_name(groups["name"])


def _counts(name: str, value: object) -> bool:
    # Python refuses to turn much larger integers into text.
    return type(value) is int and value.bit_length() <= 64 and is_count(name, str(value))


def _is_shown(name: str, value: str) -> bool:
    """Return whether a value is not a secret, whatever its name."""
    return value.lower() in _NOTHING or is_count(name, value) or is_folder(name, value)
