"""What a replica computes in a sync: the update of its own shards from the contributions of all replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._arithmetic._reduction import reduce_shards
from ..._errors import CorruptedObjectError, ObjectNotFoundError
from ..._store._api import block_bytes_of
from ..._wire._inputs import Inputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..._arithmetic._clip import Clipped
    from ..._arithmetic._sync_job import SyncJob
    from ..._exchange._traffic import Traffic
    from .._participant import Participant
    from ._members import Members
    from ._objects import SyncObjects


class Reduction:
    """The update of one replica's shards in one sync.

    Args:
        participant: What stays the same from sync to sync.
        job: What is synced.
        objects: The objects of the sync.
        members: The contributions that it is made of.
        traffic: Counts what is read.

    Attributes:
        clipped: How the contributions were clipped, once it has run; see :attr:`.SyncReport.clipped`.
    """

    def __init__(
        self,
        participant: Participant,
        job: SyncJob,
        objects: SyncObjects,
        members: Members,
        traffic: Traffic,
    ) -> None:
        self._participant = participant
        self._job = job
        self._objects = objects
        self._members = members
        self._traffic = traffic
        self.clipped: tuple[Clipped, ...] = ()

    def run(self, sync: int, publish: Callable[[int], None]) -> None:
        """Update the shards one after another, and publish each before the next is updated.

        Args:
            sync: The number of the sync in messages.
            publish: Stores a shard that has been updated.
        """
        participant, job = self._participant, self._job
        try:
            with self._inputs() as inputs:
                if inputs.clipping is not None:
                    self.clipped = inputs.clipping.report()
                for shard in participant.owned(job.layout):
                    reduce_shards(
                        job,
                        [shard],
                        inputs.sources,
                        participant.chunk_bytes,
                        participant.scratch,
                        sync=sync,
                        block_bytes=inputs.block_bytes,
                        shares=self._members.shares(job.terms.weighting),
                    )
                    publish(shard)
        except ObjectNotFoundError as error:
            raise CorruptedObjectError(f"{error}: something deletes objects there") from error

    def _inputs(self) -> Inputs:
        participant, members = self._participant, self._members.contributions()

        def count(size: int) -> None:
            self._traffic.received += size

        return Inputs(
            self._job,
            self._objects.format,
            participant.store,
            participant.timing,
            members,
            members[participant.rank],
            [[shard] for shard in participant.owned(self._job.layout)],
            chunk_bytes=participant.chunk_bytes,
            block_bytes=block_bytes_of(participant.store.store),
            received=count,
        )
