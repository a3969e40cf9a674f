"""Runs of all ranks in virtual time, killed at chosen operations and started again."""

import random
from dataclasses import dataclass, field
from functools import partial

import keys_lab
import pytest
import torch
from simulated import Connection, Fault, Killed, Scheduler, SimulatedStore
from simulated._simulation import _repeat
from training_lab import fill, push, values

from diloco_core import DiLoCo, ObjectStoreAllReduce, StoreExchange, Timing
from diloco_core._store._drivers._folder import FolderStore

LOST_AFTER = 100.0


class OverwritingFolder(FolderStore):
    """A folder as a store that ignores the conditions of conditional writes."""

    def create(self, key, data):
        self.put(key, [data] if isinstance(data, bytes) else data)
        return True


#: Folders in which fixed runs behave the same: one that can decide, and one that cannot.
STORES = {"deciding": FolderStore, "overwriting": OverwritingFolder}


class Process(Connection):
    """One process's access to the store.

    Args:
        number: The number of the process in its simulation.
        before: Called with process, kind and key before each request; None for nothing.
        **options: Those of a connection.
    """

    def __init__(self, shared, scheduler, *, number, before, **options):
        super().__init__(shared, scheduler, **options)
        self.number = number
        self._before = before or (lambda *_: None)
        for kind in ("put", "create", "get", "open", "list"):
            setattr(self, kind, partial(self._after_that, kind, getattr(self, kind)))

    def _after_that(self, kind, request, key, *more, **options):
        self._before(self, kind, key)
        return request(key, *more, **options)

    def delete(self, keys, *, unread=False):
        keys = list(keys)
        for key in keys:
            self._before(self, "delete", key)
        super().delete(keys, unread=unread)

    def die(self):
        """Be killed now: nothing that the process does from now on reaches the store."""
        self.killed = True
        raise Killed


@dataclass
class Run:
    """One run with all of its incarnations; each call of :meth:`live` starts all ranks once.

    Attributes:
        limits: For some ranks, limits of :class:`Timing` for processes that are started from now
            on.
        before: Called with the process, a kind of request and a key before each request.
        ended: When each process of the last simulation ended, in virtual seconds.
    """

    ranks: int = 2
    fragments: int = 1
    adam: bool = False
    syncs: int = 6
    options: dict = field(default_factory=dict)
    store: SimulatedStore = field(default_factory=SimulatedStore)
    incarnations: int = 0
    wishes: dict = field(default_factory=dict)  # outer learning rates, by (rank, inner step)
    behind: int = 0
    chunk: int = 64
    limits: dict = field(default_factory=dict)
    before: object = None
    ended: dict = field(default_factory=dict)

    def whole(self):
        """Return whether the store holds an initial state of every fragment."""
        states = keys_lab.keys_of(self.store.objects, "state", copy=False)
        syncs = {keys_lab.kept(key).sync for key in states}
        first = sum(map(keys_lab.of("state", sync=0), states))
        return len(syncs) > self.fragments or (self.fragments == 1 and first == self.ranks)

    def net(self):
        return fill(torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)))

    def live(self, *kills, resume=False, starts=(), until=None, ranks=None, seed=0, **more):
        """Start all ranks, or some, and let those in ``kills`` (rank, operation, kind) die.

        What each returned or raised.
        """
        faults = [Fault(rank, 1, operation, kind) for rank, operation, kind in kills]
        ranks = range(self.ranks) if ranks is None else ranks
        starts = [*starts, *(0.0 for _ in range(self.ranks))]
        processes = [(rank, starts[rank], faults, resume) for rank in ranks]
        return self.simulate(processes, seed, until=until or self.syncs, **more)

    def overtaken(self, sleeps, at, seed=0):
        """Start all ranks, let some hang (rank, operation, seconds), and resume the run at a time.

        What all processes came to.
        """
        faults = [
            Fault(rank, 1, operation, "zombie", seconds) for rank, operation, seconds in sleeps
        ]
        first = [(rank, 0.0, faults, False) for rank in range(self.ranks)]
        second = [(rank, at, [], True) for rank in range(self.ranks)]
        results = self.simulate([*first, *second], seed, until=self.syncs)
        return results[: self.ranks], results[self.ranks :]

    def silent(self, *ranks, until, **more):
        """Let all ranks train, and kill some before they can say that they leave.

        What each returned or raised.
        """

        def before(process, kind, key):
            if process.rank in ranks and kind == "put" and keys_lab.of("note")(key):
                process.die()

        self.before, before = before, self.before
        results = self.live(until=until, **more)
        self.before = before
        return results

    def simulate(self, processes, seed=0, events=None, **more):
        self.incarnations += 1
        scheduler = Scheduler()
        for seconds, event in (events or {}).items():
            scheduler.call_at(seconds, event)
        results = {}

        def process(number, rank, faults, resume):
            chance = random.Random(f"{self.incarnations}/{seed}/{number}")
            options = {"rank": rank, "faults": faults, "chance": chance, "replace": lambda: None}
            options |= {"number": number, "before": self.before}
            connection = Process(self.store, scheduler, **options)
            limits = {
                "lost_after": LOST_AFTER, "sync_timeout": 1000.0, "join_timeout": 1000.0,
                "clock": connection.clock, "sleep": connection.sleep,
                "repeat": partial(_repeat, scheduler, connection), "return_within": 0.0,
                **self.limits.get(rank, {}),
            }  # fmt: skip
            try:
                exchange = self.exchange(connection, scheduler, limits, resume)
                results[number] = self.train(exchange, **more)
            except (Exception, Killed) as error:
                results[number] = error
            self.ended[number] = scheduler.now

        self.ended.clear()
        for number, (rank, start, faults, resume) in enumerate(processes):
            body = partial(process, number, rank, faults, resume)
            scheduler.start_at(start, body)
        assert scheduler.run(100_000.0)
        return [results[number] for number in sorted(results)]

    def exchange(self, connection, scheduler, limits, resume):
        """Return the exchange by which a process takes part."""
        options = {"timing": Timing(**limits), "chunk_bytes": self.chunk, "resume": resume}
        return StoreExchange(connection, connection.rank, self.ranks, **options)

    def train(self, exchange, until, seen=None, **more):
        net = self.net()
        if self.adam:
            inner = torch.optim.Adam(net.parameters(), lr=0.1)
        else:
            inner = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
        options = {"sync_every": 2 * self.fragments, "fragments": self.fragments}
        options |= {"save_inner_every": 1, "flush": "none", **self.options, **more}
        with DiLoCo(net, inner, exchange, **options) as outer:
            self.behind += outer.batches_to_skip
            if seen is not None:
                seen[exchange.rank] = (outer.committed, outer.inner_steps, outer.batches_to_skip)
            while outer.committed < until:
                if (exchange.rank, outer.inner_steps) in self.wishes:
                    outer.set_outer_lr(self.wishes[exchange.rank, outer.inner_steps])
                push(net, inner, exchange.rank, outer.inner_steps)
        return values(net)


#: What may be written again with other bytes, by the same process.
_CHANGING = ("beats/", "beginning.json", "inner/")


class Overwriting(SimulatedStore):
    """Lets everything be created twice, and notes what was written twice with different bytes."""

    def __init__(self):
        super().__init__(exclusive=False)
        self.first = {}

    def write(self, key, data):
        super().write(key, data)
        written_once = key.startswith("generations/") and not key.split("/", 2)[2].startswith(
            _CHANGING
        )
        if written_once and self.first.setdefault(key, data) != data:
            self.differing.append(key)


@dataclass
class Generations(Run):
    """A run in such a store."""

    store: SimulatedStore = field(default_factory=Overwriting)

    def begun(self):
        """The folders of the generations that count, the newest first."""
        return keys_lab.begun(self.store.objects)

    def keys(self, kind="", generation=0):
        """The keys of a kind of objects in a generation; the newest one is number 0."""
        folder = self.begun()[generation] + kind
        return sorted(key for key in self.store.objects if key.startswith(folder))


class Changing(SimulatedStore):
    """A store in which some objects become others while they are written.

    Args:
        wanted: Which: given a key, whether it is one of them.
        change: Given the key and what is written, returns what is stored.
    """

    def __init__(self, wanted, change):
        super().__init__()
        self.wanted, self.change = wanted, change

    def write(self, key, data):
        super().write(key, self.change(key, data) if self.wanted(key) else data)


@dataclass
class Means(Run):
    """Replicas that take ``until`` means together; each ends with the last one."""

    def train(self, exchange, until):
        with ObjectStoreAllReduce(exchange) as reduce:
            for number in range(until):
                tensor = torch.full((64,), float(exchange.rank + number))
                reduce.mean([tensor])
        return {"mean": tensor}


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
