"""Shards of a strict run that are damaged in the store while the run lives: their owners still have the values.

Whoever finds one leaves a request below ``requests/`` and waits. The owner looks there while it waits for others itself,
writes the shard again with the same content, and removes the request.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from .._errors import CorruptedObjectError

if TYPE_CHECKING:
    from .._exchange._endings import Ending
    from .._store._patient import Patient

_log = logging.getLogger("diloco_core")

_REQUEST = re.compile(r"requests/([0-9]{8})/([0-9]{5})\.([0-9]{5})")


class Repairs:
    """What one replica asks for, and is asked for, in one sync. Not thread-safe.

    Args:
        store: The run's prefix.
        rank: This replica.
        sync: Number of the sync in the exchange.
    """

    def __init__(self, store: Patient, rank: int, sync: int) -> None:
        self._store = store
        self._rank = rank
        self._sync = sync
        self._asked: dict[int, CorruptedObjectError] = {}

    def ask(self, shard: int, owner: int, error: CorruptedObjectError) -> None:
        """Ask the owner of a shard to write it again."""
        _log.error("rank %d, which has its values, is asked to write it again: %s", owner, error)
        self._store.put(self._key(shard, self._rank), lambda: [b"damaged"])
        self._asked[shard] = error

    def pending(self, shard: int) -> bool:
        """Whether a shard was asked for and has not been written again yet."""
        if shard in self._asked and self._key(shard, self._rank) not in self._requests():
            del self._asked[shard]
        return shard in self._asked

    def asked_for(self) -> CorruptedObjectError | None:
        """The error of a shard that was asked for, if there is one."""
        return next(iter(self._asked.values()), None)

    def check(self, shard: int, ending: Ending | None) -> None:
        """Give up where the owner of a shard that was asked for has ended.

        Raises:
            CorruptedObjectError: It says what can be done.
        """
        if shard in self._asked and ending is not None:
            raise CorruptedObjectError(
                f"{self._asked[shard]} Rank {ending.rank}, which had its values, has left the run: this replica cannot take "
                "over the result of this sync. If the others have finished, use the model of one of them; otherwise start "
                "again from a checkpoint, on another prefix."
            ) from self._asked[shard]

    def wanted(self) -> list[int]:
        """The shards that anybody asks for."""
        return sorted(
            {
                int(match[2])
                for match in map(_REQUEST.fullmatch, self._requests())
                if match is not None
            }
        )

    def done(self, shard: int) -> None:
        """A shard has been written again."""
        prefix = self._key(shard, 0)[: -len("00000")]
        self._store.delete([key for key in self._requests() if key.startswith(prefix)])

    def _requests(self) -> dict[str, int]:
        return self._store.list(f"requests/{self._sync:08}/")

    def _key(self, shard: int, rank: int) -> str:
        return f"requests/{self._sync:08}/{shard:05}.{rank:05}"
