"""What a run's record says, checked: anybody in the environment may have written into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from diloco_protocol import BackendError, DilocoError, Outcome

_MOST = 1e11
"""More than any count, and later than any time in Unix seconds."""


def _text(value: object) -> bool:
    return isinstance(value, str)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < _MOST


def _whole(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < _MOST


def _positive(value: object) -> bool:
    return _whole(value) and value != 0


def _ranks(value: object) -> bool:
    return isinstance(value, list) and all(map(_whole, value)) and 0 < len(value) == len(set(value))


def _maybe(value: object) -> bool:
    return value is None or isinstance(value, bool)


def _outcome(value: object) -> bool:
    try:
        return value in (None, "") or (isinstance(value, str) and bool(Outcome.from_json(value)))
    except DilocoError:
        return False


_SHAPES: dict[str, dict[str, Callable[[object], bool]]] = {
    "launch": {
        "id": _text, "fingerprint": _text, "ranks": _ranks, "world_size": _positive, "app": _text, "function": _text,
        "environment": _text, "grace": _number, "at": _number,
    },
    "call": {"call": _text},
    "cancel": {"by": _text, "at": _number},
    "life": {"attempt": _whole, "at": _number},
    "attempt": {"at": _number},
    "end": {"started": _whole, "failed": _whole, "at": _number, "again": _maybe, "outcome": _outcome},
    "over": {"at": _number},
}  # fmt: skip


class DamagedRecordError(BackendError):
    """Raised when an entry of a record is not what this version writes."""


def entry(entries: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """An entry of a record; None if there is none.

    Raises:
        DamagedRecordError: It was damaged, or written by somebody else or by another version.
    """
    return None if key not in entries else checked(key, entries[key])


def checked(key: str, value: Any) -> Mapping[str, Any]:
    """The value of an entry.

    Raises:
        DamagedRecordError: As for :func:`entry`.
    """
    shape = _SHAPES[key.partition("-")[0]]
    if isinstance(value, Mapping) and all(right(value.get(name)) for name, right in shape.items()):
        return value
    raise DamagedRecordError(
        f"the entry {key!r} of the run's record on Modal is {value!r:.200}, and has to have {', '.join(shape)}: it was damaged, "
        "or written by somebody else or by another version of diloco-modal"
    )


def launch_of(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry of the launch, which must be there.

    Raises:
        DamagedRecordError: As for :func:`entry`.
    """
    return checked("launch", entries["launch"])


def call_of(entries: Mapping[str, Any], rank: int) -> str | None:
    """The call that holds a rank; empty if none may hold it, None if none does yet.

    Raises:
        DamagedRecordError: As for :func:`entry`.
    """
    held = entry(entries, f"call-{rank}")
    return None if held is None else str(held["call"])
