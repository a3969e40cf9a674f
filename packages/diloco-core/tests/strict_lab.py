"""Strict runs in virtual time, whose processes are killed at chosen operations and started again."""

import random
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import pytest
import torch
from training_lab import fill, push, values

from diloco_core import DiLoCo, ObjectStoreExchange, Timing
from diloco_core._strict._liveness import Liveness
from diloco_core._strict._records._manifest import Manifest
from diloco_core._strict._records._records import Claim, beat_key
from diloco_core.testing import Fault, SimulatedStore
from diloco_core.testing._connection import Connection
from diloco_core.testing._scheduler import Killed, Scheduler

LOST_AFTER = 100.0


@dataclass
class Run:
    """One run with all of its lives; every call of :meth:`live` starts all of its ranks once."""

    ranks: int = 2
    fragments: int = 1
    adam: bool = False
    syncs: int = 6
    options: dict = field(default_factory=dict)
    store: SimulatedStore = field(default_factory=SimulatedStore)
    lives: int = 0
    wishes: dict = field(default_factory=dict)  # outer learning rates, by (rank, inner step)
    behind: int = 0
    chunk: int = 64

    def whole(self):
        """Whether the store holds an initial state of every fragment."""
        published = {key.split("/")[1] for key in self.store.objects if key.startswith("state/")}
        shards = sum(key.startswith("state/00000000/") for key in self.store.objects)
        return len(published) > self.fragments or (self.fragments == 1 and shards == self.ranks)

    def net(self):
        return fill(torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)))

    def live(self, *kills, resume=False, starts=(), until=None, ranks=None, seed=0, **more):
        """Start all ranks, or some, and let those in ``kills`` (rank, operation, kind) die. What each returned or raised."""
        faults = [Fault(rank, 1, operation, kind) for rank, operation, kind in kills]
        ranks = range(self.ranks) if ranks is None else ranks
        starts = [*starts, *(0.0 for _ in range(self.ranks))]
        processes = [(rank, starts[rank], faults, resume) for rank in ranks]
        return self.simulate(processes, seed, until=until or self.syncs, **more)

    def overtaken(self, sleeps, at, seed=0, alive=None):
        """Start all ranks, let some hang (rank, operation, seconds), and resume the run at a time. What all processes came to.

        Those in ``alive`` give a sign of life every so many seconds, ten times.
        """
        faults = [
            Fault(rank, 1, operation, "zombie", seconds) for rank, operation, seconds in sleeps
        ]
        first = [(rank, 0.0, faults, False) for rank in range(self.ranks)]
        second = [(rank, at, [], True) for rank in range(self.ranks)]
        results = self.simulate([*first, *second], seed, alive or {}, until=self.syncs)
        return results[: self.ranks], results[self.ranks :]

    def simulate(self, processes, seed, alive=None, events=None, **more):
        self.lives += 1
        scheduler = Scheduler()
        for rank, seconds in (alive or {}).items():
            for count in range(1, 11):
                beat = partial(self.store.write, beat_key(rank), b"%d" % count)
                scheduler.call_at(count * seconds, beat)
        for seconds, event in (events or {}).items():
            scheduler.call_at(seconds, event)
        results, connections = {}, {}

        def process(number, rank, faults, resume):
            connection = Connection(
                self.store,
                scheduler,
                rank=rank,
                faults=faults,
                chance=random.Random(f"{self.lives}/{seed}/{number}"),
                replace=lambda: None,
            )
            connections[number] = connection
            timing = Timing(
                clock=connection.clock,
                sleep=connection.sleep,
                lost_after=LOST_AFTER,
                sync_timeout=1000.0,
                join_timeout=1000.0,
            )
            try:
                exchange = ObjectStoreExchange(
                    connection,
                    rank,
                    self.ranks,
                    timing=timing,
                    chunk_bytes=self.chunk,
                    resume=resume,
                )
                results[number] = self.train(exchange, **more)
            except (Exception, Killed) as error:
                results[number] = error

        # A beat that needs no thread: who is alive has written it once, and nobody is watched for longer than that here.
        with mock.patch.object(Liveness, "start", lambda liveness: liveness._beat(0)):
            for number, (rank, start, faults, resume) in enumerate(processes):
                body = partial(process, number, rank, faults, resume)
                scheduler.start_at(start, body)
            assert scheduler.run(100_000.0)
        return [results[number] for number in sorted(results)]

    def train(self, exchange, until, seen=None, **more):
        net = self.net()
        if self.adam:
            inner = torch.optim.Adam(net.parameters(), lr=0.1)
        else:
            inner = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
        options = {
            "sync_every": 2 * self.fragments,
            "fragments": self.fragments,
            "save_inner_every": 1,
            "flush": "none",
            **self.options,
            **more,
        }
        with DiLoCo(net, inner, exchange, **options) as outer:
            self.behind += outer.batches_to_skip
            if seen is not None:
                seen[exchange.rank] = (outer.committed, outer.inner_steps, outer.batches_to_skip)
            while outer.committed < until:
                if (exchange.rank, outer.inner_steps) in self.wishes:
                    outer.set_outer_lr(self.wishes[exchange.rank, outer.inner_steps])
                push(net, inner, exchange.rank, outer.inner_steps)
        return values(net)


def in_folder(run, folder):
    """The objects of a run as files of a folder, which can be exported."""
    for key, data in run.store.objects.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)
    return folder


def refused(run, error, match, **options):
    """All ranks refuse, and nothing is written."""
    before = dict(run.store.objects)
    for result in run.live(resume=True, **options):
        with pytest.raises(error, match=match):
            raise result
    assert run.store.objects == before


def claim(rank, nonce, life=1, *, world_size=2, beat=10.0):
    """The claim of a process that gives a sign of life every so many seconds."""
    digest, milliseconds = 32 * "0", round(1000 * beat)
    return Claim(rank, world_size, "", 64, digest, nonce, "host", 7, milliseconds, life)


def manifest(earlier=(), ranks=2, fragments=1):
    tables = [{"shards": ranks} for _ in range(fragments)]
    members = [(1, f"nonce {rank}") for rank in range(ranks)]
    settings = {"committed": "0"}
    return Manifest("", 32 * "c", ranks, settings, {}, tables, {}, members, list(earlier))
