"""Test how a run begins: one replica uploads the initial state, however long that takes."""

import pytest
import torch
from simulated import Schedule, SimulatedStore, SimulatedTraining, flawless, simulate

from diloco_core import (
    DiLoCo,
    Elastic,
    RendezvousTimeoutError,
    StoreExchange,
    StoreUnavailableError,
)
from diloco_core._run._records._keys import BEGINNING, MANIFEST
from diloco_core._store._open import open_store


def uploads(store, folder="initial"):
    """The folders of initial states (or of what is not synced) that were ever written."""
    return {
        key.split("/")[1]
        for _, key, size in store.history
        if key.startswith(f"{folder}/") and size is not None
    }


def begun_at(store):
    """Return when the manifest was written."""
    return min(time for time, key, _ in store.history if key == MANIFEST)


def slow(node, prefix, seconds):
    """Let every upload below a folder take so long, before anything of it is seen."""
    node.before("put", lambda key: node.sleep(seconds * key.startswith(prefix)))


def enter(node, sync_every=1):
    """Begin or join a run, whose model has frozen weights, too."""
    model = torch.nn.Module()
    model.trained = torch.nn.Parameter(torch.zeros(40))
    model.frozen = torch.nn.Parameter(torch.ones(300), requires_grad=False)
    inner = torch.optim.SGD([model.trained], lr=1.0)
    with DiLoCo(model, inner, node.exchange, sync_every=sync_every, save_inner_every=0):
        return node.connection.clock()


@pytest.mark.parametrize("prefix", ["initial/", "unsynced/"])
def test_others_wait_although_no_object_comes_for_many_graces(prefix, caplog):
    """Nothing in the store grows while one object takes longer than the grace: rank 0 has to say
    that it is still writing.
    """

    def train(node):
        slow(node, prefix, 70.0)
        return enter(node)

    store = SimulatedStore()
    outcome = simulate(train, 4, Elastic(2, grace=5.0), store=store, limit=2000.0)
    assert not outcome.errors()
    assert len(uploads(store)) == len(uploads(store, "unsynced")) == 1
    first = min(time for time, key, _ in store.history if key == BEGINNING)
    uploaded = [time for time, key, _ in store.history if key.startswith(("ini", "unsynced/"))]
    assert first < min(uploaded)
    assert BEGINNING not in store.objects
    assert "initial values" not in caplog.text, "nobody else has begun"
    (notice,) = [text for text in caplog.messages if "rank 3 has waited 6" in text]
    assert "another replica is uploading the initial state" in notice


def test_the_limit_for_waiting_counts_from_the_last_sign():
    def train(node):
        slow(node, "unsynced/", 5000.0)  # join_timeout is 1,800 s
        return enter(node)

    outcome = simulate(train, 3, Elastic(2, grace=60.0))
    assert not outcome.errors()
    assert all(seconds > 5000.0 for seconds in outcome.results.values())
    signs = [time for time, key, _ in outcome.store.history if key == BEGINNING]
    assert 400 < len(signs) < 600, "not more often than beats"


def test_where_rank_0_does_not_come_one_of_the_others_begins(caplog):
    training = SimulatedTraining(syncs=3, sizes=(40,))
    outcome = flawless(training, Schedule(8, starts=[300.0], latency=0.01), Elastic(2, grace=10.0))
    assert len(uploads(outcome.store)) == 1
    assert 10.0 <= begun_at(outcome.store) < 12.0
    warning = "rank 1: no replica has begun the run at simulated://run within the grace of 10 s"
    assert warning in caplog.text


def test_one_who_dies_in_the_upload_costs_one_grace(caplog):
    def train(node):
        if (node.rank, node.incarnation) == (0, 1):
            slow(node, "unsynced/", 100.0)

            def dies(key):
                node.connection.killed = node.connection.clock() > 33.0

            node.before("put", dies)
        return enter(node)

    store = SimulatedStore()
    schedule = Schedule(4, latency=0.01, restart_after=500.0)
    outcome = simulate(train, schedule, Elastic(2, grace=10.0), store=store, limit=2000.0)
    assert not outcome.errors()
    signs = [time for time, key, size in store.history if key == BEGINNING and size is not None]
    last = max(time for time in signs if time < 34.0)
    assert last > 30.0
    again = min(time for time in signs if time > 34.0)
    assert 10.0 <= again - last < 10.0 + 4.0, "looks are up to 2 s apart"
    assert "that was beginning the run at simulated://run has given no sign within" in caplog.text
    assert len(uploads(store)) == 2


@pytest.mark.parametrize(
    ("sign", "begins"),
    [
        (lambda n: b"%d" % n, 70.0 + 8.0),
        (lambda n: b"\xffv9 %d" % n, 70.0 + 8.0),
        (lambda n: b"same", 7.0 + 8.0),
        (lambda n: bytes(5000 + n), 8.0),
    ],
    ids=["others", "of another version", "the same", "too large to be one"],
)
def test_each_new_sign_counts_for_one_grace(sign, begins):
    """As rank 1 sees those that are given every seven seconds, ten times."""
    store = SimulatedStore()

    def train(node):
        if node.rank == 1:
            return enter(node)
        for number in range(1, 11):
            node.sleep(7.0)
            if MANIFEST not in store.objects:
                store.write(BEGINNING, sign(number))
                store.write(f"initial/a/{number}", b"x")
        return enter(node)

    schedule = Schedule(3, starts=[3000.0], latency=0.001)
    assert not simulate(train, schedule, Elastic(1, grace=8.0), store=store).errors()
    assert begins <= begun_at(store) < begins + 2.5


def test_signs_that_do_not_get_through_are_no_end(caplog):
    def train(node):
        if node.rank == 0:
            slow(node, "initial/", 400.0)

            def fails(key):
                if key == BEGINNING and 10.0 < node.connection.clock() < 120.0:
                    raise StoreUnavailableError("away", lasting=True)

            node.before("put", fails)
        return enter(node)

    outcome = simulate(train, 2, Elastic(1, grace=200.0))
    assert not outcome.errors()
    assert len(uploads(outcome.store)) == 1
    assert "is uploading the initial state of the run: away" in caplog.text


def test_the_limit_is_kept_where_nobody_begins():
    settings, schedule = Elastic(1, grace=5000.0), Schedule(2, starts=[1e6], latency=0.01)
    options = {"limit": 3000.0, "most_incarnations": 1, "sync_timeout": 6000.0}
    error = simulate(enter, schedule, settings, **options).results[1, 1]
    assert isinstance(error, RendezvousTimeoutError)
    assert "no replica began the run at simulated://run within 1800 s" in str(error)


def test_on_a_folder(tmp_path):
    """The real thread, over a real store, while an upload takes as long as it takes to see
    three signs.
    """
    store, signs = open_store(str(tmp_path)), set()
    put = store.put

    def slowed(key, parts):
        while key.startswith("initial/") and len(signs) < 3:
            signs.add(store.get(BEGINNING))
        return put(key, parts)

    store.put = slowed
    exchange = StoreExchange(store, 0, 1, Elastic(1, grace=0.02))
    model = torch.nn.ParameterList([torch.zeros(40)])
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with DiLoCo(model, inner, exchange, sync_every=1, save_inner_every=0):
        assert BEGINNING not in store.list("")
