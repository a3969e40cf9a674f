"""How an elastic run begins, in virtual time: one replica uploads the initial state, however long
that takes.
"""

import threading
from itertools import pairwise

import pytest
import torch
from simulated import Schedule, SimulatedStore, SimulatedTraining, simulate, violations
from training_lab import PATIENCE

from diloco_core import (
    DiLoCo,
    Elastic,
    MismatchError,
    RendezvousTimeoutError,
    RunExistsError,
    StoreExchange,
    Timing,
)
from diloco_core._errors import StoreUnavailableError
from diloco_core._run._records._keys import BEGINNING, MANIFEST
from diloco_core._run._settings import Joiner
from diloco_core._run._start import beginning, wait_for_manifest
from diloco_core._store._open import open_store
from diloco_core._store._patient import Patient
from diloco_core._timing import repeat_in_thread


def uploads(store, folder="initial"):
    """The folders of initial states (or of what is not synced) that were ever written."""
    return {
        key.split("/")[1]
        for _, key, size in store.history
        if key.startswith(f"{folder}/") and size is not None
    }


def begun_at(store):
    """When the manifest was written."""
    return min(time for time, key, _ in store.history if key == MANIFEST)


@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_an_upload_that_takes_longer_than_the_grace_is_waited_for(topology):
    training = SimulatedTraining(syncs=3, sizes=(40,))
    settings = Elastic(2, grace=3.0, topology=topology)
    outcome = simulate(
        training, Schedule(12, latency=0.4), settings
    )  # twelve shards, one after the other
    assert violations(outcome, training) == []
    assert len(uploads(outcome.store)) == 1


def slow(node, prefix, seconds):
    """Let every upload below a folder take so long, before anything of it is seen."""
    put = node.connection.put

    def slowed(key, parts):
        if key.startswith(prefix):
            node.sleep(seconds)
        return put(key, parts)

    node.connection.put = slowed


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
    """Where one object takes longer than the grace, nothing in the store grows: rank 0 has to say
    that it is at it.
    """

    def train(node):
        slow(node, prefix, 70.0)
        return enter(node)

    store = SimulatedStore()
    outcome = simulate(
        train, Schedule(4, latency=0.01), Elastic(2, grace=5.0), store=store, limit=2000.0
    )
    assert not outcome.errors()
    assert len(uploads(store)) == len(uploads(store, "unsynced")) == 1
    assert {
        key for _, key, size in store.history if key.startswith(prefix) and size is not None
    } != set()
    first = min(time for time, key, _ in store.history if key == BEGINNING)
    assert first < min(
        time for time, key, _ in store.history if key.startswith(("initial/", "unsynced/"))
    )
    assert BEGINNING not in store.objects
    assert "initial values" not in caplog.text, "nobody else has begun"
    waits = [
        record.getMessage() for record in caplog.records if "has waited" in record.getMessage()
    ]
    assert any(
        "rank 3 has waited 6" in text and "another replica is uploading the initial state" in text
        for text in waits
    )


def test_the_limit_for_waiting_counts_from_the_last_sign():
    def train(node):
        slow(node, "unsynced/", 5000.0)  # join_timeout is 1,800 s
        return enter(node)

    outcome = simulate(train, Schedule(3, latency=0.01), Elastic(2, grace=60.0))
    assert not outcome.errors()
    assert all(seconds > 5000.0 for seconds in outcome.results.values())


def test_where_rank_0_does_not_come_one_of_the_others_begins(caplog):
    training = SimulatedTraining(syncs=3, sizes=(40,))
    outcome = simulate(training, Schedule(8, starts=[300.0], latency=0.01), Elastic(2, grace=10.0))
    assert violations(outcome, training) == []
    assert len(uploads(outcome.store)) == 1
    assert 10.0 <= begun_at(outcome.store) < 12.0
    assert (
        "rank 1: no replica has begun the run at simulated://run within the grace of 10 s"
        in caplog.text
    )


@pytest.mark.parametrize("prefix", ["initial/", "unsynced/"])
def test_whoever_begins_in_place_of_rank_0_is_waited_for_too(prefix):
    def train(node):
        slow(node, prefix, 70.0)
        return enter(node)

    outcome = simulate(
        train, Schedule(6, starts=[3000.0], latency=0.01), Elastic(2, grace=5.0), limit=4000.0
    )
    assert not outcome.errors()
    assert len(uploads(outcome.store)) == 1


def test_one_who_dies_in_the_upload_costs_one_grace(caplog):
    def train(node):
        if (node.rank, node.incarnation) == (0, 1):
            slow(node, "unsynced/", 100.0)
            put = node.connection.put

            def dies(key, parts):
                node.connection.killed = node.connection.clock() > 33.0
                return put(key, parts)

            node.connection.put = dies
        return enter(node)

    store = SimulatedStore()
    outcome = simulate(
        train,
        Schedule(4, latency=0.01, restart_after=500.0),
        Elastic(2, grace=10.0),
        store=store,
        limit=2000.0,
    )
    assert not outcome.errors()
    signs = [time for time, key, size in store.history if key == BEGINNING and size is not None]
    last = max(time for time in signs if time < 34.0)
    assert last > 30.0
    assert 10.0 <= min(time for time in signs if time > 34.0) - last < 10.0 + 4.0, (
        "looks are up to 2 s apart"
    )
    assert (
        "the replica that was beginning the run at simulated://run has given no sign within the "
        "grace" in caplog.text
    )
    assert len(uploads(store)) == 2


def test_what_was_left_by_a_beginner_that_died_long_ago_costs_nothing_more():
    training = SimulatedTraining(syncs=3, sizes=(40,))
    store = SimulatedStore()
    store.write("initial/0123456789abcdef/000.00000.safetensors", b"x")
    store.write(BEGINNING, b'{"rank": 0}')
    outcome = simulate(
        training, Schedule(4, starts=[300.0], latency=0.01), Elastic(2, grace=10.0), store=store
    )
    assert violations(outcome, training) == []
    assert 10.0 <= begun_at(outcome.store) < 12.0


class Hand:
    """A clock that is moved by whoever sleeps, and what happens when."""

    def __init__(self, tmp_path, events=()):
        self.now = 0.0
        self.events = sorted(events, key=lambda event: event[0])
        self.store = Patient(open_store(str(tmp_path)), self.timing())

    def timing(self, **options):
        return Timing(clock=lambda: self.now, sleep=self.sleep, **options)

    def sleep(self, seconds):
        self.now += seconds
        while self.events and self.events[0][0] <= self.now:
            self.events.pop(0)[1]()

    def wait(self, read=lambda: None, rank=1, grace=8.0, **options):
        """When a replica begins by itself."""
        store = Patient(self.store.store, self.timing(**options))
        assert wait_for_manifest(store, joiner(rank, grace), read, lambda: None) is None
        return self.now

    def begins(self, rank=0, run_id="", grace=8.0, **options):
        """The context in which a replica begins the run."""
        store = Patient(self.store.store, self.timing(**options))
        store.put = lambda *arguments: self.store.put(*arguments)
        return beginning(store, joiner(rank, grace, run_id))


def joiner(rank, grace, run_id=""):
    return Joiner(rank, 4, run_id, Elastic(1, grace=grace), 1024)


def says(hand, data):
    return lambda: hand.store.put(BEGINNING, lambda: [data])


class TestSigns:
    """Of whoever begins, as another rank sees them."""

    def test_each_counts_for_one_grace(self, tmp_path):
        hand = Hand(tmp_path)
        hand.events = [(7.0 * number, says(hand, b"%d" % number)) for number in range(1, 20)]
        assert 7 * 19 + 8 <= hand.wait() < 7 * 19 + 8 + 1.1

    def test_the_same_again_is_none(self, tmp_path):
        hand = Hand(tmp_path)
        hand.events = [(7.0 * number, says(hand, b"same")) for number in range(1, 20)]
        assert 15 <= hand.wait() < 16.1

    def test_nothing_else_is_taken_for_one(self, tmp_path):
        hand = Hand(tmp_path)
        hand.events = [
            (float(n), lambda n=n: hand.store.put(f"initial/a/{n}", lambda: [b"x"]))
            for n in range(1, 7)
        ]
        hand.events += [(7.0, says(hand, bytes(5000)))]
        assert 8 <= hand.wait() < 8.5

    def test_who_begins_another_run_or_has_another_version_is_awaited_until_its_manifest_is_there(
        self, tmp_path
    ):
        hand, manifest = Hand(tmp_path), []

        def read():
            if manifest:
                raise RunExistsError("another run's")

        hand.events = [(7.0 * number, says(hand, b"\xffv9 %d" % number)) for number in range(1, 20)]
        hand.events += [(140.0, lambda: manifest.append(1))]
        with pytest.raises(RunExistsError):
            hand.wait(read)

    def test_the_limit_is_kept_where_nobody_begins(self, tmp_path):
        hand = Hand(tmp_path)
        with pytest.raises(
            RendezvousTimeoutError, match=r"no replica began the run at .* within 5 s"
        ):
            hand.wait(join_timeout=5.0)
        assert 5.0 <= hand.now < 5.5

    def test_ranks_wake_up_one_after_the_other(self, tmp_path):
        times = [Hand(tmp_path).wait(rank=rank) for rank in (1, 2, 3)]
        assert all(0.3 < b - a < 1.0 for a, b in pairwise(times))

    def test_the_log_says_once_a_minute_what_is_waited_for(self, tmp_path, caplog):
        hand = Hand(tmp_path)
        hand.events = [(100.0, says(hand, b"1"))]
        hand.wait(grace=150.0, rank=3)
        texts = [
            record.getMessage() for record in caplog.records if "has waited" in record.getMessage()
        ]
        assert len(texts) == 4
        assert "rank 3 has waited 60 s" in texts[0]
        assert "no replica has begun it yet" in texts[0]
        assert "gave its last sign 19 s ago" in texts[1]


class TestSaying:
    """That one begins."""

    def test_before_anything_else_and_again_until_it_is_done(self, tmp_path, monkeypatch):
        hand, repeated = Hand(tmp_path), []
        stopped = []

        def repeat(seconds, act):
            repeated.append((seconds, act))
            return lambda: stopped.append(1)

        seen = []
        with hand.begins(2, "r", repeat=repeat):
            seen.append(hand.store.get(BEGINNING))
            ((seconds, act),) = repeated
            for _ in range(3):
                act()
                seen.append(hand.store.get(BEGINNING))
            assert not stopped
        assert seconds == 2.0
        assert len(set(seen)) == 4
        assert all(b'"rank": 2' in sign and b'"run_id": "r"' in sign for sign in seen)
        assert stopped == [1]
        assert hand.store.get(BEGINNING) is None

    def test_not_more_often_than_beats(self, tmp_path):
        hand, periods = Hand(tmp_path), []

        def repeat(seconds, act):
            periods.append(seconds)
            return lambda: None

        with hand.begins(grace=600.0, repeat=repeat, beat_interval=7.0):
            assert periods == [7.0]

    def test_it_ends_with_a_failure(self, tmp_path):
        hand, stopped = Hand(tmp_path), []

        def repeat(seconds, act):
            return lambda: stopped.append(1)

        with pytest.raises(MismatchError), hand.begins(repeat=repeat):
            raise MismatchError("x")
        assert stopped == [1]

    def test_a_sign_that_does_not_get_through_is_no_end(self, tmp_path, caplog, monkeypatch):
        hand, acts = Hand(tmp_path), []

        def repeat(seconds, act):
            acts.append(act)
            return lambda: None

        def fails(key, parts):
            raise StoreUnavailableError("away", lasting=True)

        with hand.begins(repeat=repeat):
            with monkeypatch.context() as patch:
                patch.setattr(hand.store, "put", fails)
                acts[0]()
            assert "is uploading the initial state of the run: away" in caplog.text
            before = hand.store.get(BEGINNING)
            acts[0]()
            assert hand.store.get(BEGINNING) != before

    @pytest.mark.processes
    def test_repeating_in_a_thread(self):
        count, thrice = [], threading.Event()

        def act():
            count.append(threading.current_thread())
            if len(count) == 3:
                thrice.set()

        stop = repeat_in_thread(0.0001, act)
        assert thrice.wait(PATIENCE)
        stop()
        (thread,) = set(count)
        assert thread is not threading.current_thread()
        assert thread.daemon
        assert not thread.is_alive()

    def test_on_a_folder(self, tmp_path):
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
        with DiLoCo(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            exchange,
            sync_every=1,
            save_inner_every=0,
        ):
            assert BEGINNING not in store.list("")
