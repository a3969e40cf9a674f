"""Shards of a strict run that are damaged in the store while the run is going on, when their owners still have the values.

A replica that finds a damaged shard writes a request under ``requests/`` and waits. The owner looks for requests while it
waits for other replicas itself; it writes the shard again with the same content, and deletes the request.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError

if TYPE_CHECKING:
    from ..._exchange._endings import Ending
    from ..._store._patient import Patient

_log = logging.getLogger("diloco_core")

_REQUEST = re.compile(r"requests/([0-9]{8})/([0-9]{5})\.([0-9]{5})")


class Repairs:
    """The requests that one replica makes and is given in one sync. Not thread-safe.

    Args:
        store: The run's prefix.
        rank: The rank of this replica.
        sync: Number of the sync in the exchange.
    """

    def __init__(self, store: Patient, rank: int, sync: int) -> None:
        self._store = store
        self._rank = rank
        self._sync = sync
        self._asked: dict[int, CorruptedObjectError] = {}

    def ask(self, shard: int, owner: int, error: CorruptedObjectError) -> None:
        """Ask the owner of a shard to write it again."""
        _log.error(
            "a shard is damaged: %s Rank %d, which has its values, is asked to write it again.",
            str(error).rstrip(".") + ".",
            owner,
        )
        self._store.put(self._key(shard, self._rank), lambda: [b"damaged"])
        self._asked[shard] = error

    def pending(self, shard: int) -> bool:
        """Whether this replica has asked for a shard that has not been written again yet."""
        if shard in self._asked and self._key(shard, self._rank) not in self._requests():
            del self._asked[shard]
        return shard in self._asked

    def asked_for(self) -> CorruptedObjectError | None:
        """The error that shows the damage of a shard that this replica has asked for; None if it waits for no such shard."""
        return next(iter(self._asked.values()), None)

    def check(self, shard: int, ending: Ending | None) -> None:
        """Give up if this replica has asked for the shard and the owner has ended.

        Raises:
            CorruptedObjectError: The owner has ended; the error says what can be done.
        """
        if shard in self._asked and ending is not None:
            raise CorruptedObjectError(
                f"{self._asked[shard]} Rank {ending.rank}, which had the values, has left the run, so this replica cannot "
                "adopt the result of this sync. If the other replicas have finished, use the model of one of them; otherwise "
                "start again from a checkpoint, on another prefix."
            ) from self._asked[shard]

    def wanted(self) -> list[int]:
        """The shards that any replica asks for."""
        return sorted(
            {
                int(match[2])
                for match in map(_REQUEST.fullmatch, self._requests())
                if match is not None
            }
        )

    def done(self, shard: int) -> None:
        """Delete the requests for a shard that has been written again."""
        prefix = self._key(shard, 0)[: -len("00000")]
        self._store.delete([key for key in self._requests() if key.startswith(prefix)])

    def _requests(self) -> dict[str, int]:
        return self._store.list(f"requests/{self._sync:08}/")

    def _key(self, shard: int, rank: int) -> str:
        return f"requests/{self._sync:08}/{shard:05}.{rank:05}"
