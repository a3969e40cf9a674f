"""Read and check a run's record: any program in the environment may have written into it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from diloco_protocol import BackendError, DilocoError, Outcome
from diloco_protocol.backend import MAX_REPLICAS, shown

LATEST = 1e11
"""A time in Unix seconds that is later than any in a record."""
_MOST = 2**30
"""A number that is larger than any count."""
_LONGEST_GRACE = 3600.0
_CALL = re.compile(r"call-(0|[1-9][0-9]{0,8})")
_CALL_ID = re.compile("fc-[A-Za-z0-9_-]{1,100}")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _call(value: object) -> bool:
    return isinstance(value, str) and (value == "" or _CALL_ID.fullmatch(value) is not None)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < LATEST


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def _ranks(value: object) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) <= MAX_REPLICAS
        and all(_count(rank) and rank < MAX_REPLICAS for rank in value)
        and len(value) == len(set(value))
    )


def _outcome(value: object) -> bool:
    try:
        return value in (None, "") or (isinstance(value, str) and bool(Outcome.from_json(value)))
    except DilocoError:
        return False


_SHAPES: dict[str, dict[str, Callable[[Any], bool]]] = {
    "launch": {
        "id": _is_text, "fingerprint": _is_text, "ranks": _ranks,
        "world_size": lambda value: _count(value) and 0 < value <= MAX_REPLICAS,
        "app": _is_text, "function": _is_text, "environment": _is_text, "at": _number,
        "grace": lambda value: _number(value) and value <= _LONGEST_GRACE,
        "rendezvous": lambda value: value is None or _is_text(value),
    },
    "call": {"call": _call},
    "cancel": {"by": _is_text, "at": _number},
    "life": {"attempt": lambda value: _count(value) and value > 0, "at": _number},
    "attempt": {"at": _number},
    "end": {
        "started": _count, "failed": _count, "at": _number, "outcome": _outcome,
        "again": lambda value: value is None or isinstance(value, bool),
    },
    "over": {"at": _number},
}  # fmt: skip


class DamagedRecordError(BackendError):
    """Raised when an entry of a record does not have the form that this version writes."""


def damaged(text: str) -> DamagedRecordError:
    """Make the error for a damaged record, which says what to do."""
    return DamagedRecordError(
        f"{text}. 'modal dict items diloco-RUN_ID' shows the record; cancel_run ends the calls "
        "that it knows, and 'modal dict delete diloco-RUN_ID' removes it then"
    )


def written(value: Mapping[str, Any]) -> str:
    """Return an entry as a record keeps it: JSON, so that reading it never runs foreign code."""
    return json.dumps(value, separators=(",", ":"))


def entry(entries: Mapping[str, str], key: str) -> Mapping[str, Any] | None:
    """Return an entry of a record; None if there is no such entry.

    Raises:
        DamagedRecordError: It was damaged, or written by another program or another version.
    """
    return None if key not in entries else checked(key, entries[key])


def checked(key: str, text: str) -> Mapping[str, Any]:
    """Return the value of an entry.

    Raises:
        DamagedRecordError: As for :func:`entry`.
    """
    shape = _SHAPES[key.partition("-")[0]]
    value = parsed(text)
    if isinstance(value, Mapping) and all(right(value.get(name)) for name, right in shape.items()):
        return value
    raise damaged(
        f"the entry {key!r} of the run's record on Modal is {shown(text) if text else 'no text'}, "
        f"and has to have {', '.join(shape)}: it was damaged, or written by another program or "
        "by another version of diloco-modal"
    )


def parsed(text: str) -> Any:
    """Return the value of a JSON text; None if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def launch_of(entries: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the entry of the launch.

    Raises:
        DamagedRecordError: As for :func:`entry`; or there is no such entry.
    """
    launch = checked("launch", entries.get("launch", ""))
    if max(launch["ranks"]) >= launch["world_size"]:
        raise damaged(
            f"the entry 'launch' of the run's record on Modal has rank {max(launch['ranks'])} of "
            f"{launch['world_size']} replicas: it was damaged, or written by another program"
        )
    return launch


def calls_of(entries: Mapping[str, str]) -> dict[int, str | None]:
    """Return what :func:`call_of` returns for each rank of the launch.

    Raises:
        DamagedRecordError: As for :func:`entry`; or a call holds a rank that the launch does not
            have.
    """
    calls, damage = readable_calls(entries)
    if damage:
        raise damage[0]
    return calls


def readable_calls(
    entries: Mapping[str, str],
) -> tuple[dict[int, str | None], list[DamagedRecordError]]:
    """Do the same as :func:`calls_of`, but return errors instead of raising the first one."""
    calls: dict[int, str | None] = {}
    damage, ranks = [], launch_of(entries)["ranks"]
    for rank in ranks:
        try:
            calls[rank] = call_of(entries, rank)
        except DamagedRecordError as error:
            damage.append(error)
    known = set(ranks)
    damage += [stray(entries, rank) for rank, _ in held_calls(entries) if rank not in known]
    return calls, damage


def stray(entries: Mapping[str, str], rank: int) -> DamagedRecordError:
    """Make the error for a call that holds a rank which the launch does not have."""
    return damaged(
        f"the run's record on Modal has an entry 'call-{rank}' ({shown(entries[f'call-{rank}'])}), "
        "and the ranks of its entry 'launch' leave that out: one of them was damaged, or written "
        "by another program"
    )


def held_calls(entries: Mapping[str, str]) -> list[tuple[int, str]]:
    """Return the ranks that calls hold, and these calls, as far as a record can be read.

    The entry of the launch does not matter.
    """
    calls = []
    for key in entries:
        with contextlib.suppress(DamagedRecordError):
            if (match := _CALL.fullmatch(key)) and (call := call_of(entries, int(match[1]))):
                calls.append((int(match[1]), call))
    return sorted(calls)


def call_of(entries: Mapping[str, str], rank: int) -> str | None:
    """Return the call that holds a rank; empty if no call may hold it, None if none does yet.

    Raises:
        DamagedRecordError: As for :func:`entry`.
    """
    holder = entry(entries, f"call-{rank}")
    return None if holder is None else str(holder["call"])
