"""How the replicas that resume a run meet: each says which processes it sees, and they have met when all say the same.

The claims of earlier attempts stay in the store, and cannot be told from those of processes that are there now: ranks may even
have had different numbers of lives. But each process draws a nonce when it starts, and a process that is dead by then can
never have named it. So each process writes down the nonce of the newest process of every rank that it sees, and writes it
again when it sees a newer one. When all of them have written the same nonces, each has answered all others.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ..._errors import CorruptedObjectError, RendezvousTimeoutError, RunExistsError
from ..._exchange._endings import named_ranks
from ..._store._parallel import in_parallel
from ..._store._reread import read_again
from ..._timing import Wait
from ..._wire._fields import Fields
from ..._wire._sealed import seal, unseal
from .._beginning import ABSENT
from .._claims import (
    READS_AT_ONCE,
    check_not_resumed,
    check_own,
    read_claim,
    watch_own,
    write_table,
)
from .._compare import compare
from .._records._records import Claim, claim_key, claimed, noted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ..._exchange._base import Schema
    from ..._store._patient import Patient
    from ..._timing import Timing
    from .._liveness import Liveness
    from .._records._manifest import Manifest

T = TypeVar("T")


def meeting_key(rank: int, life: int) -> str:
    """Key of the record that says which processes a process sees."""
    return f"meetings/{rank:05}.{life:04}.json"


def claim_again(store: Patient, own_claim: Claim, schema: Schema, timing: Timing) -> None:
    """Claim a rank of a run that is resumed; see :func:`.claim`.

    Raises:
        RunExistsError: Another process has claimed the rank in the meantime.
    """
    rank, life = own_claim.rank, own_claim.life
    write_table(store, schema)
    if store.create(claim_key(rank, life), own_claim.to_bytes):
        return
    stored = read_claim(store, rank, timing, life)
    if stored is None or stored.nonce != own_claim.nonce:
        raise RunExistsError(
            f"another process resumes rank {rank} of the run at {store.uri} at this moment"
            + (f": process {stored.pid} on {stored.host}" if stored is not None else "")
            + ". Start every rank only once."
        )


class Meeting:
    """What one replica that resumes a run sees of the others. Not thread-safe.

    Args:
        store: The run's prefix.
        own_claim: The claim of this process; see :func:`claim_again`.
        manifest: The newest manifest of the run. The processes that it names have ended.
        timing: Limits and clock.
        liveness: Is told of the processes that are there.
        noted_before: The processes that had left a note when this one started. Their ends say nothing about this meeting.

    Attributes:
        own_claim: As given.
        manifest: As given.
    """

    def __init__(
        self,
        store: Patient,
        own_claim: Claim,
        manifest: Manifest,
        timing: Timing,
        liveness: Liveness,
        noted_before: Collection[tuple[int, int]] = (),
    ) -> None:
        self._store = store
        self.own_claim = own_claim
        self.manifest = manifest
        self._timing = timing
        self._liveness = liveness
        self._ended = [life for life, _ in manifest.members]
        self._claims = {own_claim.rank: own_claim}
        self._said: list[str] = []
        self._agreed: set[int] = set()
        self._noted_before = noted_before
        self._unreadable: dict[int, str] = {}

    @property
    def claims(self) -> list[Claim]:
        """The claims of the replicas that are there, in rank order: of all of them once they have met."""
        return [claim for _, claim in sorted(self._claims.items())]

    def meet(self, schema: Schema) -> None:
        """Wait until all replicas have met, and check that they agree.

        Raises:
            RendezvousTimeoutError: Some ranks did not arrive in time; the error names them.
            ReplicaLostError: A replica that was there has failed.
            RunExistsError: Another process has taken the rank, or replicas of two launches have met.
            MismatchError: The replicas disagree; the error says on what.
        """
        store, own_claim, timing = self._store, self.own_claim, self._timing

        def expired() -> Exception:
            return RendezvousTimeoutError(
                f"only {own_claim.world_size - len(self._missing())} of {own_claim.world_size} replicas met at {store.uri} to "
                f"resume its run within {timing.join_timeout:g} s; missing: {named_ranks(self._missing())}. All ranks have to be "
                f"started again with resume=True. {ABSENT}. If the ranks only need longer to start, raise join_timeout."
                + "".join(f" {reason.rstrip('.')}." for reason in self._unreadable.values()),
                self._missing(),
            )

        def notice(seconds: float) -> str:
            return (
                f"rank {own_claim.rank}: waiting for {named_ranks(self._missing())} to resume the run at {store.uri}, "
                f"{seconds:.0f} s so far, and up to {timing.join_timeout:g} s. {ABSENT}."
            )

        wait = Wait(
            timing,
            store.near,
            timing.join_timeout,
            self._look_around,
            expired,
            downtime=lambda: store.downtime,
            notice=notice,
        )
        self._look()
        while self._missing():
            wait.pause()
            self._look()
        for other in self.claims:
            if other is not own_claim:
                compare(store, own_claim, schema, other, timing)
        # A store without exclusive creation may have let another process overwrite the claim.
        check_own(store, own_claim, timing)

    def _missing(self) -> list[int]:
        ranks = range(self.own_claim.world_size)
        return [rank for rank in ranks if rank not in self._agreed and rank != self.own_claim.rank]

    def _look_around(self) -> None:
        self.write_again()
        # A store without exclusive creation may have let another process overwrite the claim.
        watch_own(self._store, self.own_claim, self._timing)
        check_not_resumed(self._store, self.own_claim)
        # A process that has ended since this one started, without having answered, will not answer any more.
        for rank, life in noted(self._store.list("notes/")).difference(self._noted_before):
            claim = self._claims.get(rank)
            if claim is not None and claim.life == life:
                self._liveness.know(claim)
        self._liveness.check_failures()

    def _look(self) -> None:
        """See who is there, say it, and read what the others say."""
        self._read_claims()
        ranks = range(self.own_claim.world_size)
        seen = [self._claims[rank].nonce if rank in self._claims else "" for rank in ranks]
        if seen != self._said:
            self._agreed.clear()
            self._say(seen)
        asked = [rank for rank in self._missing() if rank in self._claims]
        said = in_parallel(
            self._store.store, (partial(self._read_said, rank) for rank in asked), READS_AT_ONCE
        )
        for rank, nonces in zip(asked, said, strict=True):
            if nonces is None or nonces[self.own_claim.rank] != self.own_claim.nonce:
                continue
            # It has named a nonce that did not exist before, so it is there now.
            self._liveness.know(self._claims[rank])
            if nonces == seen and "" not in seen:
                self._agreed.add(rank)

    def _read_claims(self) -> None:
        """Read the claims of the newest processes that take part in resuming the run."""
        listed = sorted(claimed(self._store.list("claims/")))
        # Of several processes of a rank, the last one of these is the newest.
        newest = {
            rank: life
            for rank, life in listed
            if rank < self.own_claim.world_size and life > self._ended[rank]
        }
        unread = {
            rank: life
            for rank, life in newest.items()
            if rank != self.own_claim.rank
            and (rank not in self._claims or self._claims[rank].life < life)
        }
        for claim in in_parallel(self._store.store, self._reads(unread), READS_AT_ONCE):
            if claim is not None:
                self._claims[claim.rank] = claim

    def _reads(self, lives: Mapping[int, int]) -> Iterable[partial[Claim | None]]:
        return (
            partial(
                self._readable, rank, partial(read_claim, self._store, rank, self._timing, life)
            )
            for rank, life in lives.items()
        )

    def _readable(self, rank: int, read: Callable[[], T | None]) -> T | None:
        """What ``read`` returns; None if what it reads is damaged.

        The process that has written it may be gone, so that it does not matter. Otherwise that process writes it again.
        """
        try:
            value = read()
        except CorruptedObjectError as error:
            self._unreadable[rank] = str(error)
            return None
        self._unreadable.pop(rank, None)
        return value

    def write_again(self) -> None:
        """Replace this process's own records where they are damaged: the others cannot go on without them."""
        own_claim = self.own_claim
        try:
            read_claim(self._store, own_claim.rank, self._timing, own_claim.life)
        except CorruptedObjectError:
            key = claim_key(own_claim.rank, own_claim.life)
            self._store.put(key, lambda: [own_claim.to_bytes()])
        self._say(self._said)

    def _say(self, seen: Sequence[str]) -> None:
        own_claim = self.own_claim
        key = meeting_key(own_claim.rank, own_claim.life)
        record = seal("meeting", key, {"rank": own_claim.rank, "nonces": list(seen)})
        self._store.put(key, lambda: [record])
        self._said = list(seen)

    def _read_said(self, rank: int) -> list[str] | None:
        """The nonces that a process sees; None if it has not said anything yet."""
        key = meeting_key(rank, self._claims[rank].life)
        origin = f"{self._store.uri}/{key}"

        def read() -> list[str] | None:
            data = self._store.get(key)
            if data is None:
                return None
            fields = Fields(unseal("meeting", key, data, origin), origin)
            fields.agree("rank", rank)
            nonces = fields.texts("nonces")
            # A replica with another world size sees another number of ranks. The claims say so when it is compared.
            return nonces if len(nonces) == self.own_claim.world_size else None

        return self._readable(rank, partial(read_again, self._timing, read))
