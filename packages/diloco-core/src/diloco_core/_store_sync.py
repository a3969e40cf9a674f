"""One sync over an object store, step by step: contribute, commit, reduce and update, publish, adopt."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ._errors import CorruptedObjectError, MismatchError, ObjectNotFoundError, SyncTimeoutError
from ._exchange import SyncReport
from ._published import Shard
from ._sharded import contributions, reduce_shard, sent_pieces
from ._store_ahead import open_ahead
from ._timing import Wait
from ._wire import Section, SectionReader, header, section_parts, seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from ._exchange import SyncJob
    from ._layout import Layout, Piece
    from ._liveness import Liveness
    from ._sharded import Scratch, Source
    from ._store import Buffer, ObjectReader, Store
    from ._timing import Timing


@dataclass(frozen=True, slots=True)
class Participant:
    """What stays the same from sync to sync."""

    store: Store
    rank: int
    world_size: int
    timing: Timing
    liveness: Liveness
    chunk_bytes: int
    scratch: Scratch

    def owned(self, layout: Layout) -> range:
        """The shards that this replica updates and publishes."""
        return range(self.rank, layout.shards, self.world_size)


class StoreSync:
    """One sync of one replica. Used once."""

    def __init__(self, participant: Participant, number: int, job: SyncJob) -> None:
        self._p = participant
        self._number = number
        self._job = job
        self._layout = job.layout
        self._owned = participant.owned(job.layout)
        self._sent = 0
        self._received = 0
        self._waited = 0.0

    def run(self, obsolete: Iterable[str]) -> SyncReport:
        """Run the sync. ``obsolete`` are own keys that nobody needs once all have contributed to it."""
        clock = self._p.timing.clock
        start = clock()
        self._contribute()
        self._wait_for_commit()
        # Everybody has contributed to this sync, so everybody is through with the one before.
        self._p.store.delete(obsolete, unread=True)
        self._reduce()
        for shard in self._owned:
            self._publish(shard)
        self._adopt()
        return SyncReport(
            sync=self._number,
            fragment=self._job.name,
            committed=True,
            members=self._p.world_size,
            bytes_sent=self._sent,
            bytes_received=self._received,
            wait_seconds=self._waited,
            exchange_seconds=clock() - start - self._waited,
        )

    def obsolete_keys(self) -> list[str]:
        """Own keys that may go when all replicas have finished this sync."""
        state = (state_key(sync, shard) for sync in self._job.supersedes for shard in self._owned)
        return [self._delta_key(self._p.rank), *state]

    def _contribute(self) -> None:
        self._sent += self._p.store.put(self._delta_key(self._p.rank), self._delta_parts())

    def _delta_parts(self) -> Iterator[Buffer]:
        # The own shards are not sent, but they are checked: what is not finite must stop before anybody commits to it.
        for shard in self._owned:
            for _ in self._contributions(shard):
                pass
        sections = self._delta_sections(self._p.rank)
        yield header(self._layout, sections, self._metadata("delta", rank=self._p.rank))
        for section, shard in zip(sections, self._sent_shards(self._p.rank), strict=True):
            yield from section_parts(section, self._contributions(shard))

    def _contributions(self, shard: int) -> Iterator[torch.Tensor]:
        return contributions(self._job, shard, self._p.rank, self._p.chunk_bytes, self._p.scratch)

    def _wait_for_commit(self) -> None:
        """Whoever sees all contributions writes the record; everybody else waits for that one key."""
        key = f"commits/{self._number:08}.json"
        missing = self._missing_ranks()

        def look_around() -> None:
            nonlocal missing
            missing = self._missing_ranks()
            if missing:
                self._p.liveness.check(missing, self._number)
            else:
                self._commit(key)

        if missing:
            wait = self._wait(look_around, lambda: missing)
            while not self._committed(key):
                wait.pause()
            self._waited += wait.elapsed()
        else:
            self._commit(key)
        self._obey(json.loads(self._p.store.get(key)))

    def _missing_ranks(self) -> list[int]:
        found = self._p.store.list(f"deltas/{self._number:08}/")
        missing = []
        for rank in range(self._p.world_size):
            if self._delta_key(rank) in found:
                continue
            stem = self._delta_key(rank).removesuffix(f"{self._job.fingerprint[:16]}.safetensors")
            if any(key.startswith(stem) for key in found):
                raise MismatchError(
                    f"in sync {self._number}, rank {rank} contributes something else than rank {self._p.rank} "
                    f"({self._job.name}): the replicas must sync the same tensors in the same order"
                )
            missing.append(rank)
        return missing

    def _commit(self, key: str) -> None:
        # The same bytes whoever writes them, so that it does not matter if several do.
        record = {
            "sync": self._number,
            "name": self._job.name,
            "members": [{"rank": rank, "key": self._delta_key(rank)} for rank in range(self._p.world_size)],
        }
        self._p.store.put(key, [json.dumps(record, indent=1).encode()])

    def _committed(self, key: str) -> bool:
        try:
            self._p.store.get(key)
        except ObjectNotFoundError:
            return False
        return True

    def _obey(self, record: dict[str, list[dict[str, object]]]) -> None:
        members = [member["key"] for member in record["members"]]
        if members != [self._delta_key(rank) for rank in range(self._p.world_size)]:
            raise CorruptedObjectError(
                f"the commit record of sync {self._number} in {self._p.store.uri} names other members than this run has"
            )

    def _reduce(self) -> None:
        if not self._owned:
            return
        rank = self._p.rank
        others = [other for other in range(self._p.world_size) if other != rank]
        store, keys = self._p.store, [self._delta_key(other) for other in others]
        with contextlib.ExitStack() as stack:
            ahead = stack.enter_context(open_ahead(store, keys))
            readers = {
                other: stack.enter_context(reader or store.open(key))
                for other, key, reader in zip(others, keys, ahead, strict=True)
            }
            for shard in self._owned:
                deltas = {o: self._delta_reader(o, readers[o], shard) for o in others}
                sources: list[Source] = [
                    self._job.contribution if o == rank else partial(self._read, deltas[o])
                    for o in range(self._p.world_size)
                ]
                reduce_shard(self._job, shard, sources, self._p.chunk_bytes, self._p.scratch, sync=self._number)
                for delta in deltas.values():
                    delta.verify()

    def _publish(self, shard: int) -> None:
        """Store an own shard after its update: only verified contributions are in it."""
        parts = self._shard(shard).parts(self._metadata("state"))
        self._sent += self._p.store.put(state_key(self._number, shard), parts)

    def _adopt(self) -> None:
        """Read the other owners' shards, whichever is there first."""
        pending = [shard for shard in range(self._layout.shards) if shard not in self._owned]

        def owners() -> list[int]:
            return sorted({shard % self._p.world_size for shard in pending})

        wait: Wait | None = None
        while pending:
            arrived = self._adopt_published(pending)
            pending = [shard for shard in pending if shard not in arrived]
            if arrived or not pending:
                if wait is not None:
                    self._waited += wait.elapsed()
                    wait = None
                continue
            if wait is None:
                wait = self._wait(lambda: self._p.liveness.check(owners(), self._number), owners)
            wait.pause()

    def _adopt_published(self, shards: list[int]) -> list[int]:
        """Adopt those shards that are published by now; returns them."""
        store = self._p.store
        listing = store.list(f"state/{self._number:08}/")
        keys = {state_key(self._number, shard): shard for shard in shards}
        there = [key for key in keys if key in listing]

        def announce(key: str, reader: ObjectReader) -> None:
            self._shard(keys[key]).announce(reader, f"{store.uri}/{key}")

        with open_ahead(store, there, announce) as readers:
            for key, reader in zip(there, readers, strict=True):
                with reader or store.open(key) as opened:
                    self._shard(keys[key]).adopt(opened, f"{store.uri}/{key}", self._p.scratch)
                self._received += sum(map(self._layout.piece_bytes, self._layout.shard(keys[key])))
        return [keys[key] for key in there]

    def _read(self, section: SectionReader, piece: Piece, out: torch.Tensor) -> torch.Tensor:
        section.read(out)
        self._received += self._layout.piece_bytes(piece)
        return out

    def _wait(self, look_around: Callable[[], None], missing: Callable[[], list[int]]) -> Wait:
        timeout = self._p.timing.sync_timeout

        def expired() -> Exception:
            ranks = ", ".join(map(str, missing()))
            return SyncTimeoutError(
                f"sync {self._number} ({self._job.name}) at {self._p.store.uri} was not completed within {timeout:g} s; "
                f"waiting for rank {ranks}. Raise sync_timeout if they are only slow.",
                missing(),
            )

        return Wait(self._p.timing, self._p.store.near, timeout, look_around, expired)

    def _sent_shards(self, rank: int) -> list[int]:
        return [shard for shard in range(self._layout.shards) if shard % self._p.world_size != rank]

    def _delta_sections(self, rank: int) -> list[Section]:
        return [
            Section(f"shard.{shard}", sent_pieces(self._layout, shard, rank), self._seed("delta", rank, shard))
            for shard in self._sent_shards(rank)
        ]

    def _delta_reader(self, rank: int, reader: ObjectReader, shard: int) -> SectionReader:
        index = self._sent_shards(rank).index(shard)
        origin = f"{self._p.store.uri}/{self._delta_key(rank)}"
        return SectionReader(reader, self._layout, self._delta_sections(rank), index, origin)

    def _shard(self, shard: int) -> Shard:
        return Shard(self._job, shard, self._seed, self._p.chunk_bytes)

    def _seed(self, *what: object) -> int:
        return seed(self._job.fingerprint, self._number, *what)

    def _metadata(self, kind: str, **extra: object) -> dict[str, str]:
        own = {"diloco": kind, "sync": self._number, "name": self._job.name, "fingerprint": self._job.fingerprint}
        return {key: str(value) for key, value in {**own, **extra}.items()}

    def _delta_key(self, rank: int) -> str:
        return f"deltas/{self._number:08}/{rank:05}.{self._job.fingerprint[:16]}.safetensors"


def state_key(sync: int, shard: int) -> str:
    """Key of a published shard of a strict run."""
    return f"state/{sync:08}/{shard:05}.safetensors"
