"""A store that repeats requests while it is unavailable, before they count as failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from .._errors import CorruptedObjectError, ObjectNotFoundError, StoreError, StoreUnavailableError
from .._retry import NOTICE_SECONDS, Downtime, Notices, Retries
from .._timing import Timing, Wait
from ._api import RECORD_BYTES, Buffer, ObjectReader, Store, creates_once

T = TypeVar("T")

PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds between two tries; the last pause is used again while the store's patience lasts."""

_WORTH_SAYING = 1.0  # seconds of waiting, from which on an error says how long it has been

_log = logging.getLogger("diloco_core")


class Patient:
    """A store that repeats operations while it is unavailable, and reads missing objects as None.

    Each key is always written with the same content, so a repeated write is harmless, and so is one
    whose answer got lost. As thread-safe as the store itself.

    Args:
        store: The store.
        timing: Its clock and ``sleep`` are used.

    Attributes:
        timing: As given: the limits of everything that waits for what others put into the store.
        before_writing: Called before anything is written or deleted; if it raises an error, nothing
            is.
    """

    def __init__(self, store: Store, timing: Timing) -> None:
        self.store = store
        self.timing = timing
        self.uri = store.uri
        self.near = store.near
        self.before_writing: Callable[[], object] = bool
        self._downtime = Downtime(timing.clock)
        # No random jitter, so that simulated runs can be repeated exactly.
        self._retries = Retries(
            first_pause=PAUSES[0],
            longest_pause=PAUSES[-1],
            clock=timing.clock,
            sleep=timing.sleep,
            jitter=lambda: 1.0,
        )

    @property
    def downtime(self) -> float:
        """Seconds spent waiting for an unavailable store, in the store or in this class.

        See :attr:`._api.Store.downtime`.
        """
        return self.store.downtime + self._downtime.seconds()

    @property
    def patience(self) -> float:
        """For how many seconds requests to an unavailable store are repeated. It may be set."""
        return self.store.patience

    @patience.setter
    def patience(self, seconds: float) -> None:
        self.store.patience = seconds

    def get(self, key: str, largest: int = RECORD_BYTES) -> bytes | None:
        """Read a whole small object; None if there is none.

        An object of more than ``largest`` bytes is refused.
        """
        try:
            return self.attempt(lambda: self.store.get(key, largest))
        except ObjectNotFoundError:
            return None

    def peek(self, key: str, largest: int = RECORD_BYTES) -> bytes | None:
        """Read a small object whose content may be anything.

        It is as :meth:`get`, but returns no bytes of an object that is too large.
        """
        try:
            return self.get(key, largest)
        except CorruptedObjectError as error:
            if not error.unread:  # what is not an object at all, such as a pipe, is refused
                raise
            return b""

    def read(
        self, key: str, use: Callable[[ObjectReader], T], opened: ObjectReader | None = None
    ) -> T | None:
        """Open an object and return what ``use`` returns for its reader; None if it does not exist.

        ``use`` may be called again, with a new reader. If the object is open already, pass its
        reader as ``opened``: that reader is used first, and closed.
        """

        def act() -> T:
            nonlocal opened
            given_reader, opened = opened, None
            with given_reader or self.store.open(key) as reader:
                return use(reader)

        try:
            return self.attempt(act)
        except ObjectNotFoundError:
            return None

    def put(self, key: str, parts: Callable[[], Iterable[Buffer]]) -> int:
        """Write an object; returns its size in bytes."""
        self.before_writing()
        return self.attempt(lambda: self.store.put(key, parts()))

    def create(self, key: str, parts: Callable[[], bytes | Iterable[Buffer]]) -> bool:
        """Make sure that an object exists.

        Returns True if this call wrote it; if False, read what is there.
        """
        self.before_writing()
        return self.attempt(lambda: self.store.create(key, parts()))

    def creates_once(self) -> bool:
        """Say whether the store keeps its promise of ``create``.

        Some accept conditional writes and ignore the condition.
        """
        return creates_once(self.store, self.attempt)

    def list(self, prefix: str) -> dict[str, int]:
        """Keys below a folder and their sizes."""
        return self.attempt(lambda: self.store.list(prefix))

    def delete(self, keys: Iterable[str], *, unread: bool = False) -> None:
        """Delete objects; with ``unread``, a driver may write over their space."""
        keys = list(keys)
        self.before_writing()
        self.attempt(lambda: self.store.delete(keys, unread=unread))

    def wait(
        self,
        timeout: float,
        expired: Callable[[], Exception],
        look_around: Callable[[], None] = lambda: None,
        *,
        alarms: Iterable[float] = (),
        notice: Callable[[float], str] = lambda _: "",
        notice_after: float = NOTICE_SECONDS,
    ) -> Wait:
        """A wait for others, see :class:`.Wait`.

        Time in which the store cannot be reached does not count towards any limit.
        """
        return Wait(
            self.timing,
            self.near,
            timeout,
            look_around,
            expired,
            alarms,
            downtime=lambda: self.downtime,
            notice=notice,
            notice_after=notice_after,
        )

    def repeat(self, seconds: float, act: Callable[[], object], failure: str) -> Callable[[], None]:
        """Call ``act``, which writes a sign of life, every so many seconds in the background.

        Returns a function that ends this.

        If the store fails, ``failure`` is logged with the reason. That is not fatal: the next sign
        may get through in time.
        """

        def act_if_possible() -> None:
            try:
                act()
            except (StoreError, OSError) as error:
                _log.warning("%s: %s", failure, str(error).rstrip("."))

        return self.timing.repeat(seconds, act_if_possible)

    def attempt(self, act: Callable[[], T]) -> T:
        """Call ``act``, and again while the store is unavailable or must be sent an object anew."""
        tries = 0
        notices = Notices(_log.warning, self._retries.clock)

        def again(error: Exception) -> bool:
            nonlocal tries
            tries += 1
            if not isinstance(error, StoreUnavailableError):
                return False
            # A lasting fault may still be over soon, for example if the permissions of a folder are
            # being corrected now.
            if not error.anew if self.store.retries else error.lasting and tries > len(PAUSES):
                return False
            notices.failed(str(error))
            return True

        start = self._retries.clock()
        try:
            return self._retries.run(act, again, self.store.patience, self._downtime)
        except StoreUnavailableError as error:
            waited = self._retries.clock() - start
            is_told = self.store.retries and not error.anew and not error.lasting
            if is_told or waited < _WORTH_SAYING:
                raise
            reason = (
                ", and no longer, since this does not pass until its cause is removed"
                if error.lasting
                else ""
            )
            message = f"{str(error).rstrip('.')}. It was tried again for {waited:.0f} s{reason}."
            raise StoreUnavailableError(message, lasting=error.lasting) from error
