"""The fields that outcomes and statuses share, and what may stand in them: one table for writers and readers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._checks import shown
from ._errors import InvalidRequestError, SpecVersionError
from ._signals import is_signal_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

LATEST = 253_402_300_799
"""The end of the year 9999 in Unix seconds, which is the last that dates can say."""
LARGEST = 2**31 - 1
"""The largest attempt, rank and world_size."""
TEXT_CHARACTERS = 32_768
"""The longest text in a record; of a longer one, :func:`sound_text` keeps both ends."""
_CUT = "\n[... cut ...]\n"


def _is_text(value: object) -> bool:
    return type(value) is str and len(value) <= TEXT_CHARACTERS and _can_be_sent(value)


def _can_be_sent(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_time(value: Any) -> bool:
    return type(value) in {int, float} and 0 <= value <= LATEST


def _or_none(allowed: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or allowed(value)


_TEXT = f"text of at most {TEXT_CHARACTERS} characters that can be sent as UTF-8"
_TIME = (_or_none(_is_time), "a number of seconds since 1970, or nothing")
_TEXT_OR_NONE = (_or_none(_is_text), f"{_TEXT}, or nothing")

_ALLOWED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "attempt": (lambda value: type(value) is int and 1 <= value <= LARGEST, f"1 to {LARGEST}"),
    "exit_code": (
        _or_none(lambda value: type(value) is int and 0 <= value <= 255),
        "what programs exit with, 0 to 255",
    ),
    "signal": (
        _or_none(lambda value: type(value) is str and is_signal_name(value)),
        "the name of a signal, such as SIGKILL, or nothing",
    ),
    "stopping": (lambda value: type(value) is bool, "true or false"),
    **dict.fromkeys(("message", "native"), (_is_text, _TEXT)),
    **dict.fromkeys(("error", "error_type", "traceback", "url"), _TEXT_OR_NONE),
    **dict.fromkeys(("started_at", "finished_at"), _TIME),
}


def check_fields(what: str, record: object, names: Iterable[str]) -> None:
    """Refuse a record in which a field holds what no record of ours holds.

    Args:
        what: What to call the record in the error.
        record: An outcome or a status.
        names: The fields to look at.

    Raises:
        InvalidRequestError: It names the field, what it holds, and what is allowed.
    """
    for name in names:
        allowed, words = _ALLOWED[name]
        value = getattr(record, name)
        if not allowed(value):
            raise InvalidRequestError(f"{what} has {name}={shown(value)}, and it must be {words}")


def check_version(what: str, data: object, version: int) -> dict[str, Any]:
    """Return a record that has the version this code reads.

    Raises:
        SpecVersionError: It has another version, or none.
    """
    found = data.get("version") if isinstance(data, dict) else None
    if not isinstance(data, dict) or type(found) is not int or found != version:
        raise SpecVersionError(
            f"{what} has version {shown(found)}, and this diloco-protocol reads version {version}"
        )
    return data


def sound_text(text: str) -> str:
    r"""Return a text as records hold it: halves of surrogate pairs escaped, and the middle of a long one left out.

    Nobody can print or send on half of a surrogate pair, and exceptions may quote anything.

    >>> sound_text("no file \udcff")
    'no file \\udcff'
    """
    return shorten(text.encode("utf-8", "backslashreplace").decode(), TEXT_CHARACTERS)


def shorten(text: str, room: int) -> str:
    """Return both ends of a text: the beginning says where it happened, the end what it was.

    What is cut is without secrets: of half a secret, nobody could tell later that it is one.
    """
    if len(text) <= room:
        return text
    from ._redact import redact_ends  # slow to import

    begin, end = redact_ends(text, max(0, (room - len(_CUT)) // 2))
    return f"{begin}{_CUT}{end}"
