"""What a replica tells over S3: every request is sent once, and what fails there delays nothing."""

import threading
import time

import pytest
import torch
from training_lab import PATIENCE, fill, identical, push, run, train

from diloco_core import DiLoCo, Timing, Transfer, connect
from diloco_core._exchange import _telemetry
from diloco_core._store._open import open_store
from diloco_protocol.telemetry import Live, live_key, newest_keys, read_history

SYNCS = 3


class Looks:
    """Stands for the thread that writes: it looks when a test says so."""

    def __init__(self):
        self.acts = []

    def __call__(self, seconds, act):
        if seconds == _telemetry._LOOK_SECONDS:
            self.acts.append(act)
        return bool


def wait_until(fact):
    deadline = time.monotonic() + PATIENCE
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def replicas(uri, **options):
    exchanges = [connect(uri, rank=rank, world_size=2, **options) for rank in range(2)]
    stores = [exchange.store for exchange in exchanges]
    results = train(lambda rank: fill(torch.nn.Linear(9, 9)), exchanges, steps=2 * SYNCS)
    assert identical(results)
    return results[0], stores


@pytest.mark.parametrize("scheme", ["obstore+s3", "fsspec+s3"])
def test_it_is_there(small_s3, scheme):
    uri = f"{scheme}://bucket/told"
    replicas(uri)
    store = open_store(uri, reading=True)
    for rank in range(2):
        live = Live.from_bytes(store.get(live_key(rank)))
        assert (live.ended, live.sync, live.step) == ("left", SYNCS, 2 * SYNCS)
    keys = newest_keys(store.list("history/"))
    assert len(keys) == 2
    for key in keys:
        assert len(read_history(store.get(key.key)).lines) == SYNCS


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("scheme", "what"),
    [
        ("obstore+s3", (503, "SlowDown")),
        ("fsspec+s3", (503, "SlowDown")),
        ("fsspec+s3", (403, "AccessDenied")),
        ("obstore+s3", ("drop", "")),  # s3fs sends what was dropped once more by itself
    ],
)
def test_a_request_that_fails_is_not_sent_again(small_s3, scheme, what):
    expected, _ = replicas(f"{scheme}://bucket/without", telemetry=False)
    for part in ("/live/", "/history/"):
        small_s3.fail(what[0], "PUT", 10**6, part, what[1])
    small_s3.log.clear()
    looks = Looks()
    result, stores = replicas(f"{scheme}://bucket/with", timing=Timing(repeat=looks))
    assert identical([result, expected])
    assert [store.downtime for store in stores] == [0.0, 0.0]
    puts = [path for method, path in small_s3.log if method == "PUT"]
    assert len([path for path in puts if "/live/" in path]) == 2  # at the end
    assert len([path for path in puts if "/history/" in path]) == 4  # with the ends


def test_a_request_that_hangs_takes_no_connection_from_the_syncs(small_s3, monkeypatch):
    """With s3fs, whose pool of connections is as large as it is told."""
    monkeypatch.setattr(_telemetry, "_END_SECONDS", 0.01)
    monkeypatch.setattr("diloco_core._timing._STOP_SECONDS", 0.01)
    monkeypatch.setattr(_telemetry, "_LOOK_SECONDS", 0.001)
    small_s3.gate, small_s3.gated = threading.Barrier(5), ("PUT", "/live/")
    before = set(threading.enumerate())
    options = {"world_size": 2, "transfer": Transfer(connections=1)}
    exchanges = [connect("fsspec+s3://bucket/hangs", rank=rank, **options) for rank in range(2)]
    try:
        run(
            lambda exchange: train(lambda rank: fill(torch.nn.Linear(9, 9)), [exchange], steps=4),
            exchanges,
        )
        assert not [key for key in small_s3.objects if "/live/" in key]
    finally:
        small_s3.gate.abort()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("diloco"):
            thread.join(PATIENCE)


def test_a_deletion_that_hangs_takes_no_thread_from_the_syncs(small_s3):
    """When a history object is written again, the one that it replaces is deleted."""
    looks, stuck = Looks(), []
    transfer = Transfer(connections=1)
    uri = "fsspec+s3://bucket/deletes"
    exchange = connect(uri, rank=0, world_size=1, transfer=transfer, timing=Timing(repeat=looks))
    gate = small_s3.gate = threading.Barrier(2)
    small_s3.gated = ("DELETE", "/history/")

    def look():
        exchange.telemetry._history_at = 0.0
        looks.acts[0]()

    model = fill(torch.nn.Linear(9, 9))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    try:
        with DiLoCo(model, inner, exchange, sync_every=1) as outer:
            push(model, inner, 0, 0)
            look()
            push(model, inner, 0, 1)
            stuck.append(threading.Thread(target=look))
            stuck[0].start()
            wait_until(lambda: gate.n_waiting)
            for step in range(2, 12):
                push(model, inner, 0, step)
            assert outer.committed == 12
        assert gate.n_waiting == 1
    finally:
        gate.abort()
    stuck[0].join(PATIENCE)
