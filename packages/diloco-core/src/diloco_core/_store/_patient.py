"""A store whose hiccups are waited out: what may be repeated is repeated a few times before it counts as failed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from .._errors import ObjectNotFoundError, StoreUnavailableError
from .._retry import Downtime, Notices, Retries
from ._api import RECORD_BYTES, creates_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .._timing import Timing
    from ._api import Buffer, ObjectReader, Store

T = TypeVar("T")

PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds between two tries; the last one is repeated while the store's patience lasts."""

_WORTH_SAYING = 1.0  # seconds

_log = logging.getLogger("diloco_core")


class Patient:
    """The operations of a store, repeated while it is unavailable, and with None for what is not there.

    Everything that is written has a key and content of its own, so a repeated write is harmless, and so is one whose
    answer got lost. Not more thread-safe than the store.

    Args:
        store: The store.
        timing: Its clock and ``sleep`` are used.

    Attributes:
        before_writing: Called before anything is written or deleted; what it raises prevents that.
    """

    def __init__(self, store: Store, timing: Timing) -> None:
        self.store = store
        self.uri = store.uri
        self.near = store.near
        self.before_writing: Callable[[], object] = bool
        self._downtime = Downtime(timing.clock)
        # Pauses without chance, so that simulated runs can be repeated.
        self._retries = Retries(
            first_pause=PAUSES[0],
            longest_pause=PAUSES[-1],
            clock=timing.clock,
            sleep=timing.sleep,
            jitter=lambda: 1.0,
        )

    @property
    def downtime(self) -> float:
        """Seconds for which the store was waited for, by itself or here; see :attr:`._api.Store.downtime`."""
        return self.store.downtime + self._downtime.seconds()

    @property
    def patience(self) -> float:
        """For how many seconds an unavailable store is asked again. It may be set."""
        return self.store.patience

    @patience.setter
    def patience(self, seconds: float) -> None:
        self.store.patience = seconds

    def get(self, key: str, largest: int = RECORD_BYTES) -> bytes | None:
        """A whole small object; larger ones than ``largest`` bytes are refused."""
        try:
            return self.attempt(lambda: self.store.get(key, largest))
        except ObjectNotFoundError:
            return None

    def read(
        self, key: str, use: Callable[[ObjectReader], T], opened: ObjectReader | None = None
    ) -> T | None:
        """What ``use`` makes of an open object; it may be called again from the start.

        ``opened`` is the object where it is open already; it is closed.
        """

        def act() -> T:
            nonlocal opened
            first, opened = opened, None
            with first or self.store.open(key) as reader:
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
        """See to it that an object exists. True: this call wrote it. False: read it, whoever wrote it."""
        self.before_writing()
        return self.attempt(lambda: self.store.create(key, parts()))

    def creates_once(self) -> bool:
        """Whether the store keeps its promise of ``create``: some accept conditional writes and ignore them."""
        return creates_once(self.store, self.attempt)

    def list(self, prefix: str) -> dict[str, int]:
        """Keys below a folder and their sizes."""
        return self.attempt(lambda: self.store.list(prefix))

    def delete(self, keys: Iterable[str], *, unread: bool = False) -> None:
        """Remove objects; with ``unread``, a driver may write over their space."""
        keys = list(keys)
        self.before_writing()
        self.attempt(lambda: self.store.delete(keys, unread=unread))

    def attempt(self, act: Callable[[], T]) -> T:
        """Do something with the store, again while it is unavailable."""
        if self.store.retries:
            return act()

        tries = 0
        notices = Notices(_log.warning, self._retries.clock)

        def again(error: Exception) -> bool:
            nonlocal tries
            tries += 1
            # What lasts may still pass at once, as when somebody is just mending the rights of a folder.
            if not isinstance(error, StoreUnavailableError) or (
                error.lasting and tries > len(PAUSES)
            ):
                return False
            notices.failed(str(error))
            return True

        start = self._retries.clock()
        try:
            return self._retries.run(act, again, self.store.patience, self._downtime)
        except StoreUnavailableError as error:
            waited = self._retries.clock() - start
            if waited < _WORTH_SAYING:
                raise
            why = (
                ", and no longer, since this does not pass until somebody mends its cause"
                if error.lasting
                else ""
            )
            text = f"{str(error).rstrip('.')}. It was tried again for {waited:.0f} s{why}."
            raise StoreUnavailableError(text, lasting=error.lasting) from error
