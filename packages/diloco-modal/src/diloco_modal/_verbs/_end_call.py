"""End a call, with a mark in the record of its run that says what ended it, and when."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from diloco_protocol import BackendError

from .._client._client import Client
from .._state._record import DamagedRecordError

_MARKS = 3
"""How many marks that do not count are replaced; then the call is ended without one."""


class Ending:
    """The attempts to end one call.

    Args:
        client: Makes the calls to Modal.
        clock: Returns the time in Unix seconds.
        rank: The rank that the call holds.
        call: The id of the call.

    Attributes:
        tried: Whether Modal may have been asked already.
    """

    def __init__(self, client: Client, clock: Callable[[], float], rank: int, call: str) -> None:
        self._client, self._clock = client, clock
        self._rank, self._call = rank, call
        self._id = uuid.uuid4().hex
        self.tried = False

    def attempt(self, record: Any, *, unmarked: bool = False) -> None:
        """Mark the call and end it; if that fails, remove the mark.

        Args:
            record: The record of the run.
            unmarked: Whether to end the call even if the mark cannot be written.

        Raises:
            BackendError: Modal could not be asked, or refused.
        """
        # The time of this try: it begins the last half minute of the container.
        mark = {"by": "executor", "at": self._clock(), "id": self._id}
        key = f"cancel-{self._rank}"
        try:
            try:
                for _ in range(_MARKS):
                    if self._client.put_once(record, key, mark) or self._counts(record, key, mark):
                        break
                    self._client.pop(record, key)
            except BackendError:
                if not unmarked:
                    raise
            self.tried = True
            self._client.cancel(self._call)
        except BaseException:
            with contextlib.suppress(BackendError):  # it may be the mark of an earlier try
                self._client.pop_own(record, key, mark)
            raise

    def _counts(self, record: Any, key: str, mark: Mapping[str, Any]) -> bool:
        """Return whether the existing mark is valid.

        It is if it was written by this try, or by a cancel that Modal has accepted; other marks
        come from tries that had no effect.
        """
        with contextlib.suppress(DamagedRecordError):
            if self._client.get(record, key) == mark:
                return True
        return self._client.status(self._call) != "PENDING"
