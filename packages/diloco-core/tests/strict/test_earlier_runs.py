"""Somebody has emptied the prefix of a strict run and uses it again, and a process of the earlier run still lives."""

import shutil
import threading
from dataclasses import dataclass
from functools import partial

import keys_lab
import pytest
import torch
from damage_lab import flip
from safetensors.torch import load_file
from strict_lab import LOST_AFTER, Means, Run
from training_lab import PATIENCE, identical

from diloco_core import (
    CorruptedObjectError,
    DiLoCo,
    ObjectStoreAllReduce,
    ReplicaLostError,
    RunExistsError,
    StoreExchange,
    export,
)
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas

pytestmark = pytest.mark.processes


def empty(folder):
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


class Replicas:
    """Two replicas that take means together, each call in a thread of its own."""

    def __init__(self, exchanges):
        self.exchanges = exchanges
        self.reduces = [ObjectStoreAllReduce(exchange) for exchange in exchanges]
        self.tensors = [torch.full((64,), float(rank)) for rank in range(2)]
        self.failed = []

    def start(self, rank):
        def sync():
            try:
                self.reduces[rank].mean([self.tensors[rank]])
            except BaseException as error:
                self.failed.append(error)

        thread = threading.Thread(target=sync)
        thread.start()
        return thread

    def sync(self):
        for thread in [self.start(rank) for rank in range(2)]:
            thread.join(PATIENCE)
        assert self.failed == []


@pytest.mark.parametrize("first", [0, 1], ids=["rank 0", "rank 1"])
def test_what_wakes_up_late_stops_and_changes_nothing(lab, tmp_path, first):
    """Rank 1 of the earlier run comes to its second sync when one replica of the later run has contributed to its own."""
    earlier = Replicas(lab.store_exchanges(tmp_path, 2))
    earlier.sync()
    empty(tmp_path / "run")
    later = Replicas(lab.store_exchanges(tmp_path, 2))
    later.sync()
    later.tensors = [torch.full((64,), float(rank)) for rank in range(2)]
    contributed, store = threading.Event(), later.exchanges[first].store
    put = store.put

    def tell(key, parts):
        written = put(key, parts)
        if keys_lab.kept(key).kind == "contribution":
            contributed.set()
        return written

    store.put = tell
    threads = [later.start(first)]
    assert contributed.wait(PATIENCE), later.failed
    with pytest.raises(RunExistsError, match=r"rank 1 of .* is taken by an earlier run"):
        earlier.reduces[1].mean([torch.full((64,), 1000.0)])
    threads.append(later.start(1 - first))
    for thread in threads:
        thread.join(PATIENCE)
    assert later.failed == []
    assert all(torch.equal(tensor, torch.full((64,), 0.5)) for tensor in later.tensors)
    assert keys_lab.keys_of(store.list(""), "note") == [], "it must not end the later run"
    for reduce in (*later.reduces, earlier.reduces[0]):
        reduce.close()
    assert len(keys_lab.keys_of(store.list(""), "note")) == 2


def waits_for_rank_1(run, act):
    """Rank 0 of the run waits in sync 1 for rank 1, which calls ``act`` before it contributes."""

    def before(process, kind, key):
        if process.rank == 1 and kind == "put" and keys_lab.of("contribution", sync=1)(key):
            act(process)

    run.before = before


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_a_claim_that_is_gone_or_damaged_does_not_end_a_run_that_has_met(harm):
    run, harmed = Means(2), []

    def act(process):
        for key in keys_lab.keys_of(run.store.objects, "claim"):
            harmed.append(key)
            if harm == "gone":
                run.store.remove(key)
            else:
                run.store.damage(key, flip(run.store.objects[key], 100))
        process.sleep(0.5 * LOST_AFTER)  # rank 0 looks whether its claim is there

    waits_for_rank_1(run, act)
    assert identical([*run.live(until=3), *Means(2).live(until=3)])
    assert harmed == [keys_lab.claim_key(rank) for rank in range(2)]
    notes = keys_lab.keys_of(run.store.objects, "note")
    assert len(notes) == 2, "the others are told of the end"


@dataclass
class Failing(Means):
    """Rank 1 fails after its first means."""

    message: str = ""

    def train(self, exchange, until):
        if not exchange.rank:
            return super().train(exchange, until)
        with ObjectStoreAllReduce(exchange) as reduce:
            reduce.mean([torch.zeros(64)])
            exchange.store.sleep(60.0)
            raise ValueError(self.message)


@pytest.fixture
def sleeper():
    """What rank 1 of an earlier run writes: its note and its sign of life."""
    run = Failing(2, message="of the earlier run")
    run.live(until=2)
    return {key: run.store.objects[key] for key in (keys_lab.note_key(1), keys_lab.beat_key(1))}


def written_later(run, sleeper):
    """A sleeper of an earlier run writes its note, and beats every 10 seconds, while rank 0 waits for rank 1."""
    note, beat = sleeper

    def write(count):
        run.store.write(note, sleeper[note])
        run.store.write(beat, keys_lab.later_beat(sleeper[beat], count))

    return {10.0 * count: partial(write, count) for count in range(1, 6)}


def test_beats_of_another_process_are_no_signs_of_life(sleeper, caplog):
    run = Means(2)
    waits_for_rank_1(run, lambda process: process.die())
    processes = [(rank, 0.0, [], False) for rank in range(2)]
    result, _ = run.simulate(processes, events=written_later(run, sleeper), until=2)
    with pytest.raises(ReplicaLostError, match=r"rank 1 has shown no sign of life for 10[0-9] s"):
        raise result
    assert LOST_AFTER < run.ended[0] < LOST_AFTER + 10.0
    ignored = "a note that says how rank 1 ended is ignored, since a process of an earlier run has"
    assert caplog.text.count(ignored) == 1


def test_its_own_note_ends_the_wait_after_that_of_another_process(sleeper, caplog):
    run = Failing(2, message="its own")
    processes = [(rank, 0.0, [], False) for rank in range(2)]
    result, _ = run.simulate(processes, events=written_later(run, sleeper), until=2)
    with pytest.raises(ReplicaLostError, match="rank 1 failed after 1 sync: ValueError: its own"):
        raise result
    assert "a note that says how rank 1 ended is ignored" in caplog.text


def history(lab, folder, seed):
    """A run of two replicas; its model."""

    def train(exchange):
        model = torch.nn.Linear(8, 8)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        generator = torch.Generator().manual_seed(seed + exchange.rank)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCo(model, inner, exchange, sync_every=1):
            for _ in range(2):
                for parameter in model.parameters():
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
                inner.step()
        return model.weight.detach().clone()

    return run_replicas(train, lab.store_exchanges(folder, 2))[0]


def test_objects_of_another_run_are_not_exported(lab, tmp_path):
    """Also where they are those of the same model after the same sync, under the names that they would have here."""
    weight = history(lab, tmp_path / "one", 10)
    history(lab, tmp_path / "other", 20)
    one, other = tmp_path / "one" / "run", tmp_path / "other" / "run"
    own, theirs = (
        keys_lab.keys_of(open_store(str(folder)).list(""), "state", rank=1)[-1]
        for folder in (one, other)
    )
    assert keys_lab.kept(own).sync == keys_lab.kept(theirs).sync == 2
    shutil.copy(other / theirs, one / theirs)  # under its own name it is passed over
    export(str(one), tmp_path / "model")
    assert torch.equal(load_file(tmp_path / "model")["weight"], weight)
    shutil.copy(other / theirs, one / own)
    with pytest.raises(CorruptedObjectError, match="00001"):
        export(str(one), tmp_path / "model", at=2)


def test_who_was_taken_over_publishes_nothing_and_deletes_nothing(lab, tmp_path):
    """Its contribution stands in its own run alone; what it calls obsolete may be what its successor goes on from."""
    (exchange,) = lab.store_exchanges(tmp_path, 1)
    reduce = ObjectStoreAllReduce(exchange)
    reduce.mean([torch.ones(4)])
    before = held(exchange.store)
    exchange.store.put(keys_lab.claim_key(0, 2), [b"a later process"])
    with pytest.raises(
        RunExistsError, match=r"rank 0 of .* has been taken over by a later process"
    ):
        reduce.mean([torch.ones(4)])
    after = held(exchange.store)
    assert before <= after
    assert keys_lab.keys_of(after, "state", sync=1) == []


def held(store):
    """The keys of contributions and states."""
    keys = store.list("")
    return {*keys_lab.keys_of(keys, "contribution"), *keys_lab.keys_of(keys, "state")}


def test_the_record_of_a_sync_says_of_which_run_it_is():
    """What is left of another run, or of an earlier version, is not taken for the record of a sync."""
    runs = Run(2), Run(2)
    for run in runs:
        run.live(until=3)
    ours, theirs = (set(keys_lab.keys_of(run.store.objects, "commit")) for run in runs)
    assert len(ours) == len(theirs) == 4
    assert not ours & theirs
    run, other = runs
    for key in sorted(theirs):
        run.store.write(key, other.store.objects[key])
    run.store.write("commits/00000009.json", b"of an earlier version")
    assert identical([*run.live(resume=True), *Run(2).live()])


@pytest.mark.parametrize("error", [RuntimeError("the data is missing"), RunExistsError("taken")])
@pytest.mark.parametrize("is_taken", [False, True], ids=["free", "taken"])
def test_who_fails_before_it_has_claimed_its_rank_speaks_for_no_other_process(
    tmp_path, error, is_taken
):
    """Its note would end the run of the process that holds the rank."""
    store = open_store(str(tmp_path))
    if is_taken:
        store.put(keys_lab.claim_key(1), [b"another process holds the rank"])
    exchange = StoreExchange(open_store(str(tmp_path)), 1, 2)
    exchange.abort(error)
    told = not is_taken and isinstance(error, RuntimeError)
    notes = keys_lab.keys_of(store.list(""), "note")
    assert notes == ([keys_lab.note_key(1)] if told else [])
