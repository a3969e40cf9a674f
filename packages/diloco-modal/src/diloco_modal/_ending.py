"""Ending a call, with a mark in the record of its run that says who did that, and when."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from diloco_protocol import BackendError

from ._client import Client
from ._record import DamagedRecordError


class Ending:
    """The end of one call, which may be tried several times.

    Args:
        client: To ask.
        clock: Unix seconds.
        rank: That the call holds.
        call: To end.

    Attributes:
        tried: Whether Modal may have been asked already.
    """

    def __init__(self, client: Client, clock: Callable[[], float], rank: int, call: str) -> None:
        self._client, self._clock = client, clock
        self._rank, self._call = rank, call
        self._id = uuid.uuid4().hex
        self._keys: set[str] = set()
        self.tried = False

    def attempt(self, record: Any, *, unmarked: bool = False) -> None:
        """Mark it and end it; if that fails, take the mark away.

        Args:
            record: Of the run.
            unmarked: End it also if that cannot be written down.

        Raises:
            BackendError: Modal could not be asked, or refused.
        """
        # The time is that of this try: from it on the container has its last half minute.
        mark = {"by": "executor", "at": self._clock(), "id": self._id}
        key = f"cancel-{self._rank}"
        self._keys.add(key)
        try:
            try:
                while not self._client.put_once(record, key, mark):
                    if self._counts(record, key, mark):
                        break
                    key = self._client.next_cancel(record, self._rank, key)
                    if not key:  # it is ended all the same
                        break
                    self._keys.add(key)
            except BackendError:
                if not unmarked:
                    raise
            self.tried = True
            self._client.cancel(self._call)
        except BaseException:
            for key in self._keys:  # those of earlier tries, too
                with contextlib.suppress(BackendError):
                    self._client.pop_own(record, key, mark)
            raise

    def _counts(self, record: Any, key: str, mark: Mapping[str, Any]) -> bool:
        """Whether the mark that is there is that of this try, or of a cancel that Modal has accepted; others came to nothing."""
        with contextlib.suppress(DamagedRecordError):
            if self._client.get(record, key) == mark:
                return True
        return self._client.status(self._call) != "PENDING"
