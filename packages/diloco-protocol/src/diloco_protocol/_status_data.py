"""Converting a status to JSON values and back."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, TypeVar

from ._checks import shown
from ._errors import InvalidRequestError
from ._fields import check_fields, sound_text
from ._types import Reason, ReplicaState, ReplicaStatus

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
