"""Test that a store sees what is planned and reported, in an order that is not luck."""

import re
import threading
from functools import partial

import pytest
import torch
from training_lab import PATIENCE, push, run

from diloco_core import DiLoCo, Elastic, ObjectNotFoundError, StoreExchange, plan_exchange
from diloco_core._store._open import open_store

pytestmark = pytest.mark.sampled

FIRST = 2
"""From this sync on, replicas come one after another."""

_CONTRIBUTION = re.compile(r"deltas/(\d{8})/\d{5}\..*\.safetensors")
_PUBLISHED = re.compile(r"state/(\d{8})/.*\d{5}(\.[0-9a-f]{16})?\.safetensors")
_RECORD = re.compile(r"commits/(\d{8})\b.*\.json")
_STATES = re.compile(r"state/(\d{8})/")


class Turns:
    """Replicas contribute and publish one after another, each after it looked for the next in vain.

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
            came = self._changed.wait_for(lambda: needed <= self._done, PATIENCE)
        assert came, f"{needed - self._done} did not happen"


class CountedFolder:
    """A store that counts the bytes of objects; of ``payload`` only those that hold tensors."""

    near = False

    def __init__(self, store, *, payload=False):
        self._store, self._payload = store, payload
        self.sent = self.received = 0

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
        self.received += 0 if self._payload else len(data)
        return data

    def list(self, prefix):
        return self._store.list(prefix)

    def open(self, key, size=None):
        reader = self._store.open(key, size)
        read_into = reader.read_into

        def counted(offset, buffer):
            self.received += len(buffer)
            read_into(offset, buffer)

        reader.read_into = counted
        return reader

    def _count_sent(self, key, size):
        self.sent += size if not self._payload or key.endswith(".safetensors") else 0


def moved(kind, stores, params, *, warm, syncs, publish_every=2, **options):
    """The bytes that a replica sent and received per sync, as a mean; and the reports, by rank.

    Args:
        kind: ``"fixed"``, or a topology.
        stores: One for each replica, which counts.
        params: How many parameters the model has.
        warm: Syncs before those that are counted.
        syncs: How many are counted.
    """
    replicas, last = len(stores), warm + syncs
    turns = Turns(replicas, kind == "gather")
    seen, reports = [[] for _ in stores], [[] for _ in stores]
    done = threading.Barrier(replicas)
    membership = None
    if kind != "fixed":
        every = publish_every if kind == "gather" else None
        membership = Elastic(replicas, topology=kind, publish_every=every)

    def replica(exchange):
        rank = exchange.rank
        model = torch.nn.ParameterList([torch.ones(params)])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)

        def count(report):
            reports[rank].append(report)
            if len(reports[rank]) in {warm, last}:
                # All are through with the sync, and none has begun the next one.
                done.wait(PATIENCE)
                seen[rank].append((stores[rank].sent, stores[rank].received))
                done.wait(PATIENCE)

        own = {"flush": "none", "save_inner_every": 0, "on_sync": count}
        with DiLoCo(model, inner, exchange, **own, **options) as outer:
            step = 0
            while outer.committed < last:
                push(model, inner, rank, step)
                step += 1

    for rank, store in enumerate(stores):
        turns.follow(rank, store)
    run(replica, [StoreExchange(s, rank, replicas, membership) for rank, s in enumerate(stores)])
    mean = [sum(after[i] - before[i] for before, after in seen) / replicas / syncs for i in (0, 1)]
    return mean, [report[warm:last] for report in reports]


OPTIMIZERS = {
    0.0: {"outer_momentum": 0.0},
    1.0: {},
    2.0: {"outer_optimizer": partial(torch.optim.Adam, lr=0.1)},
}
"""By the number of tensors that they keep for a parameter."""
ENCODED = {"state_codec": "int8", "full_state_every": 2}
SPARSE = {"codec": "topk64", "error_feedback": 0.95}


KINDS = ("fixed", "sharded", "gather")
PLANNED = ("codec", "state_codec", "full_state_every", "clip")


def compare(tmp_path, kind, replicas, params, *, outer_state=1.0, **options):
    """Return what a replica sends and receives in a sync, and what is planned."""
    stores = [CountedFolder(open_store(str(tmp_path))) for _ in range(replicas)]
    # Eight syncs, since some records are read once in so many; and after three publications the
    # store holds what it keeps.
    given = {**OPTIMIZERS[outer_state], "sync_every": 1, **options}
    counted, _ = moved(kind, stores, params, warm=6, syncs=8, **given)
    known = {name: options[name] for name in PLANNED if name in options}
    known |= {"fixed": True} if kind == "fixed" else {"topology": kind}
    known |= {"publish_every": 2} if kind == "gather" else {}
    known |= {"outer_state": outer_state, "tensors": 1}
    plan = plan_exchange(params, replicas, 1e9, **known)
    return counted, [plan.bytes_sent, plan.bytes_received]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("replicas", "outer_state"), [(1, 1.0), (4, 1.0), (3, 0.0), (3, 2.0)])
def test_counted(tmp_path, kind, replicas, outer_state):
    counted, plan = compare(tmp_path, kind, replicas, 12_000, outer_state=outer_state)
    assert counted == pytest.approx(plan, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_records(tmp_path, kind):
    """Hardly anything else is received: a change of their format shows here."""
    counted, plan = compare(tmp_path, kind, 6, 32)
    assert counted[1] == pytest.approx(plan[1], rel=0.12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"codec": "int8"},
        pytest.param({"codec": "e2m1", "clip": "median"}, marks=pytest.mark.slow),
        pytest.param(SPARSE, marks=pytest.mark.slow),
        pytest.param(ENCODED, marks=pytest.mark.slow),
        {**ENCODED, **SPARSE},
        {"codec": "int8", "sync_every": 3, "delay": 1},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_counted_of_what_is_encoded(tmp_path, kind, options):
    if kind != "gather" or "state_codec" not in options:
        counted, plan = compare(tmp_path, kind, 4, 100_000, **options)
        assert counted == pytest.approx(plan, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_reported(tmp_path, kind):
    """Reports have contributions and published state, without records."""
    stores = [CountedFolder(open_store(str(tmp_path)), payload=True) for _ in range(3)]
    counted, reports = moved(kind, stores, 24_000, warm=4, syncs=4, sync_every=1)
    reported = [
        sum(getattr(report, name) for each in reports for report in each) / 3 / 4
        for name in ("bytes_sent", "bytes_received")
    ]
    assert reported == pytest.approx(counted, rel=0.05)
