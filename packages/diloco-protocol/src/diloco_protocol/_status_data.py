"""A status in and out of JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ._errors import InvalidRequestError
from ._outcome import LATEST, shown
from ._types import Reason, ReplicaState, ReplicaStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

_TEXT = (str, type(None))
_TIME = (float, int, type(None))
_KINDS: Mapping[str, tuple[type, ...]] = {
    "state": (str,),
    "attempt": (int,),
    "reason": _TEXT,
    "stopping": (bool,),
    "exit_code": (int, type(None)),
    "signal": _TEXT,
    "message": (str,),
    "started_at": _TIME,
    "finished_at": _TIME,
    "url": _TEXT,
    "native": (str,),
}

_BOUNDS: Mapping[str, tuple[int, int]] = {
    "attempt": (1, 2**31),
    "exit_code": (0, 255),
    "started_at": (0, LATEST),
    "finished_at": (0, LATEST),
}


def status_to_data(status: ReplicaStatus) -> dict[str, Any]:
    """A status as JSON values."""
    return {
        **asdict(status),
        "state": status.state.value,
        "reason": None if status.reason is None else status.reason.value,
    }


def status_from_data(data: object) -> ReplicaStatus:
    """The inverse of :func:`status_to_data`.

    Raises:
        InvalidRequestError: It is no status; says what is wrong with it.
    """
    if not isinstance(data, dict) or data.keys() != _KINDS.keys():
        raise InvalidRequestError(f"a status must be an object with the fields {sorted(_KINDS)}")
    for name, kinds in _KINDS.items():
        if type(data[name]) not in kinds:
            raise _wrong(name, data[name])
    for name, (least, most) in _BOUNDS.items():
        if data[name] is not None and not least <= data[name] <= most:
            raise _wrong(name, data[name])
    try:
        state = ReplicaState(data["state"])
        reason = None if data["reason"] is None else Reason(data["reason"])
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None
    return ReplicaStatus(**{**data, "state": state, "reason": reason})


def _wrong(name: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"a status has {name}={shown(value)}")
