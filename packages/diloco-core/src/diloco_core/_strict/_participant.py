"""This replica in its run: what stays the same from sync to sync."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from .._arithmetic._sharded import Scratch
from ._claims import check_not_resumed, watch_own
from ._records._manifest import run_of
from ._records._records import run_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .._arithmetic._layout import Layout
    from .._store._patient import Patient
    from .._timing import Timing
    from ._liveness import Liveness
    from ._records._records import Claim


@dataclass(frozen=True, slots=True)
class Participant:
    """A replica of a strict run.

    Attributes:
        store: The run's prefix.
        rank: The rank of the replica.
        world_size: Number of replicas.
        run: The name of the run; see :func:`._records.run_name`.
        timing: Limits in seconds, and the clock.
        liveness: What is known of the other replicas.
        chunk_bytes: Size of the buffers.
        scratch: The buffers.
        check_claim: Raises an error if another run uses the prefix by now.
        check_not_resumed: Raises an error if a later process has resumed the run in the place of this one.
        earlier: The names that the run had before it was resumed; see :class:`._manifest.Manifest`.
        given_up: The beginnings of names under which nothing counts.
        life: Which life of its rank this replica is; see :class:`._records.Claim`.
    """

    store: Patient
    rank: int
    world_size: int
    run: str
    timing: Timing
    liveness: Liveness
    chunk_bytes: int
    scratch: Scratch
    check_claim: Callable[[], None]
    check_not_resumed: Callable[[], None]
    earlier: Sequence[tuple[str, int]] = ()
    given_up: Sequence[str] = ()
    life: int = 1

    @classmethod
    def of(
        cls,
        claims: Iterable[Claim],
        own_claim: Claim,
        store: Patient,
        timing: Timing,
        liveness: Liveness,
    ) -> Participant:
        """The replica with a claim, among the replicas that have met; ``claims`` are those of all of them."""
        return cls(
            store,
            own_claim.rank,
            own_claim.world_size,
            run_name(claims),
            timing,
            liveness,
            own_claim.chunk_bytes,
            Scratch(own_claim.chunk_bytes),
            partial(watch_own, store, own_claim, timing),
            partial(check_not_resumed, store, own_claim),
            life=own_claim.life,
        )

    def run_of(self, sync: int) -> str:
        """The name under which the sync of this number counts."""
        return run_of(self.earlier, self.run, sync)

    def owner(self, shard: int) -> int:
        """The rank that updates and publishes a shard."""
        return shard % self.world_size

    def owned(self, layout: Layout) -> range:
        """The shards that this replica updates and publishes."""
        return range(self.rank, layout.shards, self.world_size)
