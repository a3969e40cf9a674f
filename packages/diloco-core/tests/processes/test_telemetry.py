"""A replica of several processes tells of itself as one of a single process does."""

import time

import pytest
from training_lab import PATIENCE

from diloco_core._store._open import open_store
from diloco_protocol.telemetry import Live, Phase, live_key, newest_keys, read_history

from .several import results, start, trained, wait


def await_live(folder, rank, fact):
    """Wait until what a rank tells is as wanted."""
    deadline = time.monotonic() + PATIENCE
    live = None
    while live is None or not fact(live):
        assert time.monotonic() < deadline, live
        time.sleep(0.02)
        if (folder / "store" / live_key(rank)).exists():
            live = Live.from_bytes(open_store(str(folder / "store")).get(live_key(rank)))
    return live


def lines(folder, rank):
    store = open_store(str(folder / "store"), reading=True)
    keys = [key.key for key in newest_keys(store.list("history/")) if key.rank == rank]
    return [line for key in keys for line in read_history(store.get(key)).lines]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kinds", "case"),
    [
        (["ddp", "fsdp"], {}),
        (["ddp", "ddp"], {"connect": {"min_replicas": 2}, "options": {"delay": 1}}),
    ],
    ids=["fixed", "elastic and delayed"],
)
def test_it_is_that_of_the_replica(tmp_path, kinds, case):
    """The metrics that process 0 has logged are written, with the steps of the replica."""
    replicas = [(kind, 2) for kind in kinds]
    folder = tmp_path / "run"
    case = {**case, "log": True, "hang": [4, 0]}
    started = [start(folder, replicas, rank, case) for rank in range(2)]
    live = await_live(folder, 0, lambda live: live.step == 4)
    assert (live.phase, live.sync, live.ended) == (Phase.TRAINING, 0, None)
    assert live.metrics["process"] == 0
    (folder / "0-0.json").touch()  # it need not hang any longer
    assert [status for each in started for status, _ in wait(each)] == [0] * 4
    told = [said for _, said in results(folder, replicas)]
    for rank in range(2):
        live = await_live(folder, rank, lambda live: live.ended)
        assert (live.ended, live.step, live.sync) == ("left", 20, told[2 * rank]["committed"])
        assert [line.sync for line in lines(folder, rank)] == told[2 * rank]["reports"]
        assert {line.metrics["process"] for line in lines(folder, rank)[:-1]} == {0}


@pytest.mark.processes
def test_it_can_be_turned_off(tmp_path):
    trained(tmp_path, "run", [("ddp", 2)], {"log": True, "connect": {"telemetry": False}})
    store = open_store(str(tmp_path / "run" / "store"))
    assert store.list("commits/")
    assert not store.list("live/")
    assert not store.list("history/")
