"""Which contributions a sync is made of: what is listed, and the commit record."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from ..._arithmetic._weights import shares
from ..._errors import CorruptedObjectError, MismatchError
from ..._store._reread import read_again
from .._records._records import check_commit, commit, commit_key

if TYPE_CHECKING:
    from ..._arithmetic._rate import Rate
    from ..._terms._weighting import Weighting
    from .._participant import Participant
    from ._objects import SyncObjects

_log = logging.getLogger("diloco_core")


class Member(NamedTuple):
    """A contribution: the key of its file, who has made it, and the groups that it carries, as a bit mask."""

    key: str
    rank: int
    groups: int


class Members:
    """The contributions to one sync, as far as this replica knows them.

    Args:
        participant: What stays the same from sync to sync.
        objects: The objects of the sync.
        number: Number of the sync in the exchange.
        job_name: The name of what is synced.
        description: The sync in the words of messages.
    """

    def __init__(
        self,
        participant: Participant,
        objects: SyncObjects,
        number: int,
        job_name: str,
        description: str,
    ) -> None:
        self._participant = participant
        self._objects = objects
        self._number = number
        self._job_name = job_name
        self._description = description
        # The key of each rank's contribution says what it carries. From the listing or from the commit record.
        self._keys: dict[int, str] = {}

    def missing_ranks(self) -> list[int]:
        """Look for contributions. Returns the ranks that have not contributed yet.

        Raises:
            MismatchError: A rank contributes other tensors.
        """
        participant = self._participant
        with_other_tensors = set()
        for key in participant.store.list(self._objects.deltas):
            rank = self._objects.contributor(key)
            if rank is None:
                continue
            if self._objects.carried(rank, key) is not None:
                self._keys[rank] = key
            else:
                with_other_tensors.add(rank)
        missing = [rank for rank in range(participant.world_size) if rank not in self._keys]
        for rank in missing:
            if rank in with_other_tensors:
                raise MismatchError(
                    f"in {self._description}, rank {rank} contributes other tensors than rank {participant.rank}: all replicas "
                    "must sync the same tensors, with the same shapes and dtypes, in the same order"
                )
        return missing

    def commit(self) -> None:
        """Write the commit record. All ranks must have contributed; each of them would write the same bytes."""
        keys = [key for _, key in sorted(self._keys.items())]
        run = self._participant.run
        record = commit(run, self._number, self._job_name, keys)
        self._participant.store.put(commit_key(run, self._number), lambda: [record])

    def committed(self) -> bool:
        """Whether the commit record is there; what it says is known from then on."""
        store, run = self._participant.store, self._participant.run
        key = commit_key(run, self._number)
        origin = f"{store.uri}/{key}"

        def read() -> bool:
            data = store.get(key)
            if data is not None:
                keys = check_commit(
                    data,
                    run,
                    self._number,
                    self._job_name,
                    self._participant.world_size,
                    self._objects.carried,
                    origin,
                )
                self._keys = dict(enumerate(keys))
            return data is not None

        try:
            return read_again(self._participant.timing, read)
        except CorruptedObjectError as error:
            if self.missing_ranks():
                return False
            # The record holds only what all replicas know, and all of them would write the same bytes.
            _log.error(
                "a commit record is damaged and is written again with the same content: %s", error
            )
            self.commit()
            return True

    def contributions(self) -> list[Member]:
        """The contributions in rank order. Once the sync is committed."""
        return [
            Member(key, rank, self._objects.carried(rank, key) or 0)
            for rank, key in sorted(self._keys.items())
        ]

    def proposed(self) -> list[Rate]:
        """The learning rate that each rank proposes, in rank order. Once the sync is committed."""
        return [self._objects.proposed(key) for _, key in sorted(self._keys.items())]

    def shares(self, weighting: Weighting) -> tuple[float, ...]:
        """The share of each rank's contribution in their sum, in rank order; empty if all count the same. Once committed."""
        keys = [key for _, key in sorted(self._keys.items())]
        return shares(weighting, [self._objects.amount(key) for key in keys])
