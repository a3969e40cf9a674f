"""Publishing shards while the next ones are computed, for stores whose requests take long."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from ..._store._api import InBackground, Store


class Publications:
    """Uploads in the background, a few at a time.

    Their results are used in the thread that began the uploads, in order.

    What an upload reads must not change before its result was used.

    Args:
        store: The store. If it has no threads, or needs none, uploads are done at once.
    """

    def __init__(self, store: Store) -> None:
        self._store = store if isinstance(store, InBackground) and not store.near else None
        self._begun: deque[tuple[Future[None], Callable[[], None]]] = deque()

    def add(self, upload: Callable[[], None], use: Callable[[], None]) -> None:
        """Upload an object.

        ``use`` is called after the upload, now or later. Raises what these raise, or earlier ones.
        """
        if self._store is None:
            upload()
            use()
            return
        self._use_until(self._store.creates_at_once - 1)
        self._begun.append((self._store.submit(upload), use))

    def finish(self) -> None:
        """Wait for all uploads, and use their results. Raises what they raise."""
        self._use_until(0)

    def abandon(self) -> None:
        """Wait until no upload reads memory any more, without using their results."""
        while self._begun:
            future, _ = self._begun.popleft()
            if not future.cancel():
                with contextlib.suppress(Exception):
                    future.result()

    def _use_until(self, left: int) -> None:
        while len(self._begun) > left:
            future, use = self._begun.popleft()
            future.result()
            use()
