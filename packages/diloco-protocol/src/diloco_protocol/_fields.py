"""The fields that outcomes and statuses share, the values allowed in them, and statuses as JSON.

Writers and readers use the same table.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, TypeVar

from ._checks import has_half_a_pair, shown
from ._errors import InvalidRequestError, SpecVersionError
from ._processes import is_signal_name
from ._types import Reason, ReplicaState, ReplicaStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


LATEST = 253_402_300_799
"""The end of the year 9999 in Unix seconds, the last moment that dates can represent."""
LARGEST = 2**31 - 1
"""The largest attempt, rank and world_size."""
TEXT_CHARACTERS = 32_768
"""The longest text in a record, in characters; :func:`sound_text` shortens longer ones."""
_CUT = "\n[... cut ...]\n"


def _is_text(value: object) -> bool:
    return type(value) is str and len(value) <= TEXT_CHARACTERS and not has_half_a_pair(value)


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
    """Refuse a record in which a field has a value that none of our records has.

    Args:
        what: Name of the record in the error.
        record: An outcome or a status.
        names: The fields to check.

    Raises:
        InvalidRequestError: A field has such a value; the error names the field, its value, and
            what is allowed.
    """
    for name in names:
        allowed, words = _ALLOWED[name]
        value = getattr(record, name)
        if not allowed(value):
            raise InvalidRequestError(f"{what} has {name}={shown(value)}, and it must be {words}")


def check_version(what: str, data: object, version: int) -> dict[str, Any]:
    """Return a record if it has the version that this code reads.

    Raises:
        SpecVersionError: The record has another version, or none.
    """
    number = data.get("version") if isinstance(data, dict) else None
    if not isinstance(data, dict) or type(number) is not int or number != version:
        raise SpecVersionError(
            f"{what} has version {shown(number)}, and this diloco-protocol reads version {version}"
            ": install the same diloco-protocol where it is written and where it is read"
        )
    return data


def sound_text(text: str) -> str:
    r"""Return a text as records hold it.

    Halves of surrogate pairs are escaped, because they can be neither printed nor sent, and
    exceptions may quote anything. A long text loses its middle.

    >>> sound_text("no file \udcff")
    'no file \\udcff'
    """
    return shorten(text.encode("utf-8", "backslashreplace").decode(), TEXT_CHARACTERS)


def shorten(text: str, room: int) -> str:
    """Return both ends of a text.

    The beginning says where an error happened, and the end what it was. Secrets are removed before
    the text is cut, since half a secret could not be recognised as one later.
    """
    if len(text) <= room:
        return text
    from ._redact import redact_ends  # slow to import

    begin, end = redact_ends(text, max(0, (room - len(_CUT)) // 2))
    return f"{begin}{_CUT}{end}"


Word = TypeVar("Word", ReplicaState, Reason)
_NAMES = tuple(f.name for f in fields(ReplicaStatus))
_CHECKED = tuple(name for name in _NAMES if name not in {"state", "reason"})


def status_to_data(status: ReplicaStatus) -> dict[str, Any]:
    """Return a status as JSON values, with texts that every reader accepts.

    Raises:
        InvalidRequestError: A field has a value that no status can have.
    """
    data = asdict(status)
    for name in ("message", "url", "native"):
        if isinstance(data[name], str):
            data[name] = sound_text(data[name])
    status_from_data(data)
    return data | {
        "state": str(status.state),
        "reason": None if status.reason is None else str(status.reason),
    }


def status_from_data(data: object) -> ReplicaStatus:
    """Make a status from the result of :func:`status_to_data`.

    Raises:
        InvalidRequestError: The data is not a status; the error says what is wrong with it.
    """
    if not isinstance(data, dict) or data.keys() != set(_NAMES):
        raise InvalidRequestError(f"a status must be an object with the fields {sorted(_NAMES)}")
    state = _word(ReplicaState, "state", data["state"])
    reason = None if data["reason"] is None else _word(Reason, "reason", data["reason"])
    status = ReplicaStatus(**{**data, "state": state, "reason": reason})
    check_fields("a status", status, _CHECKED)
    return status


def _word(kind: type[Word], name: str, value: Any) -> Word:
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(kind)
        raise InvalidRequestError(
            f"a status has {name}={shown(value)}, and it must be one of {allowed}"
        ) from None
