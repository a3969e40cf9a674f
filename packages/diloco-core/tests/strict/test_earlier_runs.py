"""Somebody has emptied the prefix of a strict run and uses it again, and a process of the earlier run still lives."""

import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from strict_lab import claim
from training_lab import PATIENCE

from diloco_core import (
    CorruptedObjectError,
    DiLoCo,
    ObjectStoreAllReduce,
    ObjectStoreExchange,
    RunExistsError,
    export,
)
from diloco_core._exchange._endings import Ending, Progress
from diloco_core._store._open import open_store
from diloco_core._store._patient import Patient
from diloco_core._strict._liveness import Liveness
from diloco_core._strict._records._records import (
    claim_key,
    commit_key,
    committed_sync,
    note,
    note_key,
)
from diloco_core._timing import Timing
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

    def look_around_at_once(self):
        """As it is after some seconds of waiting."""
        for exchange in self.exchanges:
            exchange._participant.check_claim()

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
        if key.startswith("deltas/"):
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
    assert store.list("notes/") == {}, "it must not end the later run"
    for reduce in (*later.reduces, earlier.reduces[0]):
        reduce.close()
    assert len(store.list("notes/")) == 2


@pytest.mark.parametrize(
    "harm", [Path.unlink, lambda path: path.write_bytes(b"damaged")], ids=["gone", "damaged"]
)
def test_a_claim_that_is_gone_or_damaged_does_not_end_a_run_that_has_met(lab, tmp_path, harm):
    replicas = Replicas(lab.store_exchanges(tmp_path, 2))
    replicas.sync()
    for path in (tmp_path / "run" / "claims").iterdir():
        harm(path)
    replicas.look_around_at_once()
    replicas.sync()
    for reduce in replicas.reduces:
        reduce.close()
    assert len(replicas.exchanges[0].store.list("notes/")) == 2, "the others are told of the end"


def test_its_notes_and_beats_are_no_signs_of_its_successor(lab, tmp_path, caplog):
    store, clock = open_store(str(tmp_path)), lab.Clock()
    timing = Timing(beat_interval=10.0, lost_after=60.0, clock=clock, sleep=clock.sleep)
    observer = Liveness(Patient(store, timing), 0, 2, timing, "observer")
    observer.know(claim(1, "successor"))
    store.put("notes/00001.json", [note(Ending(1, "failed", Progress(3, 3), "x"), "sleeper")])
    store.put("beats/00001", [b"successor 0"])
    observer.check([1], Progress(), "sync 1")
    for beat in range(6):
        clock.sleep(10)
        store.put("beats/00001", [f"sleeper {beat}".encode()])
        observer.check([1], Progress(), "sync 1")
    clock.sleep(10)
    with pytest.raises(Exception, match="rank 1 has shown no sign of life for 70 s"):
        observer.check([1], Progress(), "sync 1")
    assert (
        caplog.text.count(
            "a note that says how rank 1 ended is ignored, since a process of an earlier run has written it"
        )
        == 1
    )
    store.put(
        "notes/00001.json", [note(Ending(1, "failed", Progress(3, 3), "its own"), "successor")]
    )
    with pytest.raises(Exception, match="its own"):
        observer.check([1], Progress(), "sync 1")


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
    newest = sorted((one / "state").iterdir())[-1]
    (own,) = newest.glob("00001.*")
    (theirs,) = (other / "state" / newest.name).glob("00001.*")
    shutil.copy(theirs, newest)  # under its own name it is passed over
    export(str(one), tmp_path / "model")
    assert torch.equal(load_file(tmp_path / "model")["weight"], weight)
    shutil.copy(theirs, own)
    with pytest.raises(CorruptedObjectError, match="00001"):
        export(str(one), tmp_path / "model", at=2)


def test_who_was_taken_over_publishes_nothing_and_deletes_nothing(lab, tmp_path):
    """Its contribution stands in its own run alone; what it calls obsolete may be what its successor goes on from."""
    (exchange,) = lab.store_exchanges(tmp_path, 1)
    reduce = ObjectStoreAllReduce(exchange)
    reduce.mean([torch.ones(4)])
    before = exchange.store.list("deltas/") | exchange.store.list("state/")
    exchange.store.put(claim_key(0, 2), [b"a later process"])
    with pytest.raises(
        RunExistsError, match=r"rank 0 of .* has been taken over by a later process"
    ):
        reduce.mean([torch.ones(4)])
    after = exchange.store.list("deltas/") | exchange.store.list("state/")
    assert before.keys() <= after.keys()
    assert not [key for key in after if key.startswith("state/00000001/")]


def test_the_record_of_a_sync_says_of_which_run_it_is():
    assert committed_sync(commit_key(32 * "a", 7)) == (16 * "a", 7)
    assert committed_sync("commits/00000007.json") is None
    assert commit_key(32 * "a", 7) != commit_key(32 * "b", 7)


@pytest.mark.parametrize("error", [RuntimeError("the data is missing"), RunExistsError("taken")])
@pytest.mark.parametrize("is_taken", [False, True], ids=["free", "taken"])
def test_who_fails_before_it_has_claimed_its_rank_speaks_for_no_other_process(
    tmp_path, error, is_taken
):
    """Its note would end the run of the process that holds the rank."""
    store = open_store(str(tmp_path))
    if is_taken:
        store.put(claim_key(1), [b"another process holds the rank"])
    exchange = ObjectStoreExchange(open_store(str(tmp_path)), 1, 2)
    exchange.abort(error)
    told = not is_taken and isinstance(error, RuntimeError)
    assert list(store.list("notes/")) == ([note_key(1)] if told else [])
