"""The lives of a replica in the record of its run, for the wrapper in the container.

Each container of a replica is one life.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco_protocol import DilocoError, Outcome

from .._state._record import checked, damaged, parsed, written
from ._errors import bounded

_ASK_SECONDS = 2.0
_RECORD_SECONDS = 20.0
_MOST_ENTRIES = 2000
"""The most lives and attempts of a replica that a container reads, one by one, before it begins.

The record may have more, since any program may write into it.
"""


class Record:
    """The Dict of a run, with a limit on the wait for Modal's answers.

    A container costs money while it waits, and has a result to report.

    Args:
        modal_dict: A ``modal.Dict``.

    Raises:
        UnavailableError: Raised by its methods if there is no answer for some time.
    """

    def __init__(self, modal_dict: Any) -> None:
        self._held = modal_dict

    def get(self, key: str) -> str | None:
        """Return the text of an entry; None if there is no such entry."""
        from . import _wire

        def get() -> str | None:
            text: str | None = _wire.get_entry(self._held, key)
            return text

        return bounded(get, _RECORD_SECONDS, f"reading {key}")

    def put(self, key: str, value: Mapping[str, Any], *, skip_if_exists: bool) -> bool:
        """Create an entry; return whether this call has created it."""

        def put() -> bool:
            return bool(self._held.put(key, written(value), skip_if_exists=skip_if_exists))

        return bounded(put, _RECORD_SECONDS, f"writing {key}")


@dataclass(frozen=True)
class Life:
    """One container of a replica.

    Attributes:
        number: Its number, from 1.
        before: How many attempts were started before it, and how many of them have failed.
        outcome: The outcome to return at once instead of running the replica, if that has ended in
            an earlier life whose container Modal took away before it could return the outcome.
    """

    number: int
    before: Mapping[str, int]
    outcome: str | None = None


def new_life(record: Any, rank: int, now: float) -> Life:
    """Begin a new life; a call has several if its container is taken away and it is run again.

    Raises:
        DamagedRecordError: There are more lives and attempts than a call can have had, or an entry
            does not have the form that this version writes.
    """
    life, before, uid = 1, {"started": 0, "failed": 0}, uuid.uuid4().hex
    while life + before["started"] <= _MOST_ENTRIES:
        key, value = f"life-{rank}-{life}", {"attempt": before["started"] + 1, "at": now, "id": uid}
        if record.put(key, value, skip_if_exists=True):
            return Life(life, before)
        if (entry_of(record, key) or {}).get("id") == uid:
            # The answer to the first try was lost, so Modal's client has sent it again.
            return Life(life, before)
        end = record.get(f"end-{rank}-{life}")
        if end is not None:
            value = parsed(end)
            outcome = value.get("outcome") if isinstance(value, Mapping) else None
            if isinstance(value, Mapping) and not _is_outcome(outcome):  # the replica is run again
                end = written({**value, "outcome": ""})
            known = checked(f"end-{rank}-{life}", end)
            before = {name: known[name] for name in before}
            if outcome is not None and _is_outcome(outcome):
                return Life(life, before, str(outcome))
        else:
            # A life that was killed has written no end; it had one attempt at least, and one more
            # after each failure.
            before["started"] += 1
            while (
                before["started"] < _MOST_ENTRIES
                and record.get(f"attempt-{rank}-{before['started'] + 1}") is not None
            ):
                before = {"started": before["started"] + 1, "failed": before["failed"] + 1}
        life += 1
    raise damaged(
        f"the run's record on Modal has more than {_MOST_ENTRIES} lives and attempts of rank {rank}"
    )


def was_cancelled(record: Any, rank: int) -> bool:
    """Return whether the call was ended while its container was being made.

    The process that ended it may have seen no life of it, and reported that nothing is left.
    """
    try:
        return record.get(f"cancel-{rank}") is not None and comes_again() is False
    except Exception:  # noqa: BLE001 - if it was cancelled, Modal ends the container in any case
        return False


def entry_of(record: Any, key: str) -> Mapping[str, Any] | None:
    """Return an entry of the record; None if there is no such entry.

    Raises:
        DamagedRecordError: It does not have the form that this version writes.
    """
    value = record.get(key)
    return None if value is None else checked(key, value)


def _is_outcome(text: Any) -> bool:
    try:
        return isinstance(text, str) and bool(Outcome.from_json(text))
    except DilocoError:
        return False


def comes_again() -> bool | None:
    """Return whether Modal will run this call again; None if that is unknown.

    It will if the call was not stopped, but only its container is being taken away.
    """
    import modal

    call_id = str(modal.current_function_call_id())
    try:
        from . import _wire

        # There is little time left: Modal kills the container soon.
        look = lambda: _wire.get_status(modal.Client.from_env(), call_id)  # noqa: E731
        return bool(bounded(look, _ASK_SECONDS, "looking at this call") == "PENDING")
    except Exception:  # noqa: BLE001 - the end has to be written down in any case
        return None
