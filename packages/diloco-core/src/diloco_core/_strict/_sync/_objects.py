"""The objects of one sync: their keys, what is in them, and what their checksums start from."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING

from ..._arithmetic._rate import NO_RATE, Rate
from ..._arithmetic._sharded import may_carry
from ..._arithmetic._weights import NO_AMOUNT, Amount
from ..._terms._weighting import Weighting
from ..._wire._coded import CodedShard
from ..._wire._delta import DeltaFormat
from ..._wire._published import Shard
from ..._wire._sections import fingerprint, seed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..._arithmetic._sync_job import SyncJob
    from .._participant import Participant

_SHARD = re.compile(r"state/([0-9]{8})/([0-9]{5})\.([0-9a-f]{16})(\.copy)?\.safetensors")
_DELTA = re.compile(
    r"deltas/([0-9]{8})/([0-9]{5})\.([0-9a-f]{16})\.[0-9a-f]{16}\.([0-9a-f]{1,16})(?:\.w([0-9]{1,18})-([0-9]{1,18}))?"
    r"(?:\.([0-9a-f-]{1,999}))?\.safetensors"
)


class SyncObjects:
    """Contributions and published shards of one sync.

    Args:
        participant: What stays the same from sync to sync.
        number: Number of the sync in the exchange.
        job: What is synced.
        steps: How many inner steps of this rank the sync counts, for those who resume the run.

    Attributes:
        rate: The learning rate of the outer step, once it is known, for those who resume the run.
    """

    def __init__(self, participant: Participant, number: int, job: SyncJob, steps: int = 0) -> None:
        self._steps = steps
        self.rate = job.rate
        self._participant = participant
        self._number = number
        self._job = job
        # This is also made from the name of the run. A process of an earlier run under this prefix that is still running
        # writes other keys, and what it may have written under the same keys does not match the checksums.
        self._fingerprint = fingerprint(participant.run, job.fingerprint)

    @property
    def deltas(self) -> str:
        """The folder of the contributions."""
        return f"deltas/{self._number:08}/"

    @property
    def states(self) -> str:
        """The folder of the published shards."""
        return f"state/{self._number:08}/"

    def delta_key(self, rank: int, groups: int, rate: Rate, amount: Amount = NO_AMOUNT) -> str:
        """Key of the contribution of a rank that carries certain groups, and proposes a learning rate.

        It says its amount if contributions are weighed.
        """
        run, job = self._participant.run[:16], self._job.fingerprint[:16]
        weighed = self._job.terms.weighting is not Weighting.EQUAL
        weight = f".w{amount.steps}-{amount.tokens}" if weighed else ""
        lr = f".{rate.text}" if rate.text else ""
        return f"{self.deltas}{rank:05}.{run}.{job}.{groups:x}{weight}{lr}.safetensors"

    def contributor(self, key: str) -> int | None:
        """The rank that has contributed an object with this key; None if it is not a contribution to this run."""
        match = _DELTA.fullmatch(key)
        return (
            int(match[2]) if match is not None and match[3] == self._participant.run[:16] else None
        )

    def carried(self, rank: int, key: str) -> int | None:
        """The groups that the contribution with this key carries; None if it is not one of this rank to this sync."""
        match = _DELTA.fullmatch(key)
        rate = None if match is None else Rate.parse(match[7] or "")
        if match is None or rate is None:
            return None
        groups = int(match[4], 16)
        valid = (
            key == self.delta_key(rank, groups, rate, self.amount(key))
            and may_carry(self._job.layout, groups)
            and len(rate.values) == len(self._job.contribution.proposal.standing.values)
        )
        return groups if valid else None

    def proposed(self, key: str) -> Rate:
        """The learning rate that the contribution with this key proposes; :meth:`carried` accepts it."""
        match = _DELTA.fullmatch(key)
        return (match and Rate.parse(match[7] or "")) or NO_RATE

    def amount(self, key: str) -> Amount:
        """How much training the contribution with this key covers; nothing if the key does not say so."""
        match = _DELTA.fullmatch(key)
        if match is None or match[5] is None:
            return Amount()
        return Amount(int(match[5]), int(match[6]))

    @cached_property
    def format(self) -> DeltaFormat:
        """The format of the contributions. A rank does not send the shards that it updates itself."""
        shards, world_size = self._job.layout.shards, self._participant.world_size
        return DeltaFormat(
            self._job,
            omit=lambda rank: range(rank, shards, world_size),
            sends_first=lambda rank: rank == 0,
        )

    def state_key(self, shard: int) -> str:
        """Key of a published shard."""
        return state_key(self._participant.run, self._number, shard)

    def shard(self, shard: int) -> Shard:
        """A published shard."""
        coded, chunk_bytes = self._job.coded, self._participant.chunk_bytes
        if coded is not None:
            full = coded.full.is_full(self._number)
            return CodedShard(self._job, shard, self._seed, chunk_bytes, coded, full=full)
        return Shard(self._job, shard, self._seed, chunk_bytes)

    def shard_metadata(self) -> dict[str, str]:
        """What the header of a published shard says beside its tensors."""
        return {
            "diloco": "state",
            "sync": str(self._number),
            "name": self._job.name,
            "fingerprint": self._job.fingerprint,
            "steps": str(self._steps),
            "outer_lr": self.rate.text,
        }

    def _seed(self, *parts: object) -> int:
        return seed(self._fingerprint, self._number, *parts)


def state_key(run: str, sync: int, shard: int) -> str:
    """Key of a published shard of a strict run; ``run`` is the name of the run."""
    return f"state/{sync:08}/{shard:05}.{run[:16]}.safetensors"


def shard_listed(key: str) -> tuple[str, int] | None:
    """The beginning of the run's name, and the sync, in the key of a published shard or its copy; None for another key."""
    match = _SHARD.fullmatch(key)
    return (match[3], int(match[1])) if match else None


def shards_listed(keys: Iterable[str]) -> set[tuple[str, int]]:
    """The syncs of which a listing has a published shard, each with the beginning of the run's name."""
    return set(filter(None, map(shard_listed, keys)))


def own_shards(keys: Iterable[str], rank: int, world_size: int) -> list[str]:
    """The keys in a listing of the shards that a rank has published, and of their copies, in whichever run."""
    matches = filter(None, map(_SHARD.fullmatch, keys))
    return [match[0] for match in matches if int(match[2]) % world_size == rank]


def contribution_listed(key: str) -> tuple[str, int] | None:
    """The beginning of the run's name, and the sync, in the key of a contribution; None if it is not such a key."""
    match = _DELTA.fullmatch(key)
    return (match[3], int(match[1])) if match else None


def own_contributions(keys: Iterable[str], rank: int, run: str) -> list[str]:
    """The keys in a listing of the contributions that a rank has made to other runs than this one."""
    matches = filter(None, map(_DELTA.fullmatch, keys))
    return [match[0] for match in matches if int(match[2]) == rank and match[3] != run[:16]]
