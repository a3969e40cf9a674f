"""Real syncs whose bytes are counted, in an order that does not depend on luck, beside what is
planned for them.
"""

import re
import threading
from functools import partial

import torch
import training_lab

from diloco_core import DiLoCo, Elastic, ObjectNotFoundError, StoreExchange, plan_exchange

FIRST = 2
"""From this sync on, replicas come one after another."""

_CONTRIBUTION = re.compile(r"deltas/(\d{8})/\d{5}\..*\.safetensors")
_PUBLISHED = re.compile(r"state/(\d{8})/.*\d{5}(\.[0-9a-f]{16})?\.safetensors")
_RECORD = re.compile(r"commits/(\d{8})\b.*\.json")
_STATES = re.compile(r"state/(\d{8})/")


class Turns:
    """In every sync, each replica contributes, and later publishes, after the one before it has
    looked in vain for the others; it looks again when they are done. All else would be luck.

    Args:
        replicas: How many there are.
        gather: Whether they take all values from contributions, so that nobody waits for what is
            published.
    """

    def __init__(self, replicas, gather):
        self._replicas = replicas
        self._gather = gather
        self._changed = threading.Condition()
        self._done = set()  # (what, sync, rank), with a key of a record as what, too

    def follow(self, rank, store):
        """Make a store wait for the turns of its rank."""
        put, create, get, listing = store.put, store.create, store.get, store.list
        store.put = lambda key, parts: self._write(rank, key, partial(put, key, parts))
        store.create = lambda key, data: self._write(rank, key, partial(create, key, data))
        store.get = lambda key, *most: self._get(rank, key, partial(get, key, *most))
        store.list = lambda prefix: self._list(rank, prefix, partial(listing, prefix))

    def _write(self, rank, key, write):
        what, match = "contributed", _CONTRIBUTION.fullmatch(key)
        if match is None and not self._gather:
            what, match = "published", _PUBLISHED.fullmatch(key)
        if match is None:
            what, match = "recorded", _RECORD.fullmatch(key)
        if match is None or int(match[1]) < FIRST:
            return write()
        sync = match[1]
        if what != "recorded":
            self._wait_for((f"saw who {what}", sync, other) for other in range(rank))
        result = write()
        self._note(what, sync, -1 if what == "recorded" else rank)
        return result

    def _get(self, rank, key, get):
        match = _RECORD.fullmatch(key)
        if match is None or ("contributed", match[1], rank) not in self._done:
            return get()
        looked = "saw who contributed", match[1], rank
        if looked in self._done or rank == self._replicas - 1:
            self._wait_for([("recorded", match[1], -1)])
        try:
            return get()
        except ObjectNotFoundError:
            self._note(*looked)
            raise

    def _list(self, rank, prefix, listing):
        match = _STATES.fullmatch(prefix)
        if match is None or ("published", match[1], rank) not in self._done:
            return listing()
        looked = "saw who published", match[1], rank
        if looked in self._done:
            self._wait_for(("published", match[1], other) for other in range(self._replicas))
        found = listing()
        self._note(*looked)
        return found

    def _note(self, *what):
        with self._changed:
            self._done.add(what)
            self._changed.notify_all()

    def _wait_for(self, needed):
        needed = set(needed)
        with self._changed:
            came = self._changed.wait_for(lambda: needed <= self._done, training_lab.PATIENCE)
        assert came, f"{needed - self._done} did not happen"


class CountedFolder:
    """A store that counts the content of objects in both directions, and what of it are
    contributions and published state.
    """

    near = False

    def __init__(self, store):
        self._store = store
        self.sent = self.received = self.payload_sent = self.payload_received = 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put(self, key, parts):
        size = self._store.put(key, parts)
        self._count_sent(key, size)
        return size

    def create(self, key, data):
        data = data if isinstance(data, bytes) else b"".join(map(bytes, data))
        self._count_sent(key, len(data))
        return self._store.create(key, data)

    def get(self, key, *most):
        data = self._store.get(key, *most)
        self.received += len(data)
        return data

    def list(self, prefix):
        return self._store.list(prefix)

    def open(self, key, size=None):
        reader = self._store.open(key, size)
        read_into = reader.read_into

        def counted(offset, buffer):
            self.received += len(buffer)
            self.payload_received += len(buffer)
            read_into(offset, buffer)

        reader.read_into = counted
        return reader

    def _count_sent(self, key, size):
        self.sent += size
        self.payload_sent += size * key.endswith(".safetensors")


def exchange_of(kind, store, rank, replicas, publish_every):
    if kind == "fixed":
        return StoreExchange(store, rank, replicas)
    every = publish_every if kind == "gather" else None
    elastic = Elastic(replicas, topology=kind, publish_every=every)
    return StoreExchange(store, rank, replicas, elastic)


def moved(kind, stores, counters, params, *, warm, syncs, publish_every=2, **options):
    """The bytes that a replica sent and received per sync, as a mean; and the reports of those
    syncs, by rank.

    Args:
        kind: ``"fixed"``, or a topology.
        stores: One for each replica.
        counters: What counts the bytes of each; ``sent`` and ``received`` are read after a sync.
        params: How many parameters the model has.
        warm: Syncs before those that are counted.
        syncs: How many are counted.
        publish_every: As for :class:`Elastic`.
        options: Those of :class:`DiLoCo`.
    """
    replicas = len(stores)
    turns = Turns(replicas, kind == "gather")
    for rank, store in enumerate(stores):
        turns.follow(rank, store)
    seen, reports = [[] for _ in stores], [[] for _ in stores]
    last = warm + syncs
    done = threading.Barrier(replicas)

    def replica(exchange):
        rank = exchange.rank
        model = torch.nn.ParameterList([torch.ones(params)])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)

        def count(report):
            reports[rank].append(report)
            if len(reports[rank]) in {warm, last}:
                # All are through with the sync, and none has begun the next one.
                done.wait(training_lab.PATIENCE)
                seen[rank].append((counters[rank].sent, counters[rank].received))
                done.wait(training_lab.PATIENCE)

        own = {"flush": "none", "save_inner_every": 0, "on_sync": count}
        with DiLoCo(model, inner, exchange, **own, **options) as outer:
            step = 0
            while outer.committed < last:
                training_lab.push(model, inner, rank, step)
                step += 1

    places = enumerate(stores)
    exchanges = [exchange_of(kind, store, r, replicas, publish_every) for r, store in places]
    training_lab.run(replica, exchanges)
    mean = [sum(after[i] - before[i] for before, after in seen) / replicas / syncs for i in (0, 1)]
    return mean, [each[warm:last] for each in reports]


def planned(kind, params, replicas, *, publish_every=2, **options):
    """What is planned for such a sync."""
    options |= {"fixed": kind == "fixed", "publish_every": publish_every, "tensors": 1}
    topology = "gather" if kind == "gather" else "sharded"
    plan = plan_exchange(params, replicas, 1e9, topology=topology, **options)
    return [plan.bytes_sent, plan.bytes_received]
