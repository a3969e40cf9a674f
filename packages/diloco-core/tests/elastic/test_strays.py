"""What is not the run's, anywhere below its prefix, is neither read nor counted nor removed."""

import os

import pytest
import torch
from simulated import SimulatedStore, SimulatedTraining, flawless, once

from diloco_core import (
    CorruptedObjectError,
    DiLoCo,
    Elastic,
    RunExistsError,
    StoreExchange,
    StoreUnavailableError,
    Timing,
)
from diloco_core._run._records._keys import Hint, claim_key, commit_key
from diloco_core._run._records._rules import collectable
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas

_NONCE = "0123456789abcdef"
_STRAYS = {
    "claims": "a.json 00000.json.bak 00000/README 00000/0001.json.bak 00000/001.json",
    "commits": "00000001.json.bak 1.json 00000001/a 00000001.json/a",
    "deltas": "00000001/ 00000001/notes.txt 00000001/hint.00000.0001.dance 00000002/a/b",
    "state": "00000001/a 00000001/000.done.json.bak 00000001/0.0.safetensors 99999999/a",
    "initial": f"a/000.00000.safetensors {_NONCE}/notes.txt {_NONCE}/000.0.safetensors",
    "kept": "000.bak state/00000001/000.bak state/00000001/a",
    "inner": "00000/notes.txt 00000/1.1.safetensors 00000/9999.99999999.safetensors.bak",
    "unsynced": "",
}
_STRAYS = {folder: ["notes.txt", *names.split()] for folder, names in _STRAYS.items()}


@pytest.mark.parametrize("folder", _STRAYS)
def test_other_files_are_ignored_and_stay(folder, publishing):
    store = SimulatedStore()
    for name in _STRAYS[folder]:
        store.write(f"{folder}/{name}", b"mine")
    settings = publishing(2, grace=5.0, retention=1)
    first = SimulatedTraining(syncs=5, sizes=(12, 9), save_every=1)
    flawless(first, 2, settings, store=store, most_incarnations=1)
    again = SimulatedTraining(syncs=7, sizes=(12, 9), save_every=1, salts=dict(first.salts))
    flawless(again, 2, settings, store=store, most_incarnations=1)
    assert [
        name for name in _STRAYS[folder] if store.objects.get(f"{folder}/{name}") != b"mine"
    ] == []
    assert "deltas/00000001/" not in {
        key[:16] for key in store.objects if key.endswith(".safetensors")
    }, "collected"


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("claims/00000/0001.json", "holds objects of an earlier run"),
        ("claims/00000.json", "that an earlier version of diloco-core has begun"),
    ],
)
def test_what_is_of_a_run_is_no_stray_file(key, told):
    store = SimulatedStore()
    store.write(key, b"")
    outcome = once(SimulatedTraining(2, (12,)), 1, Elastic(1, grace=5.0), store=store)
    assert isinstance(outcome.results[0, 1], RunExistsError)
    assert told in str(outcome.results[0, 1])


def test_only_what_the_run_has_written_is_collected():
    keys = [f"{folder}/{name}" for folder in _STRAYS for name in _STRAYS[folder]]
    hint, options = Hint(3, 1, 1, "join").key, {"last": 9, "kept": [9, 8], "initial": _NONCE}
    assert collectable([*keys, hint], retention=1, keep_deltas=False, **options) == [hint]


RECORDS = [commit_key(2), claim_key(0, 1), claim_key(0, 2), "manifest.json"]


@pytest.mark.parametrize("key", [*RECORDS, "state/00000002/000.00000.safetensors"])
def test_a_pipe_in_place_of_an_object_is_never_opened(lab, tmp_path, key):
    path = tmp_path / "run" / key
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    clock = lab.Clock()
    timing = Timing(sync_timeout=30.0, clock=clock, sleep=clock.sleep)

    def replica(exchange):
        net = lab.fill(torch.nn.Linear(4, 3))
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        with DiLoCo(net, inner, exchange, sync_every=1) as outer:
            while outer.committed < 3:
                lab.push(net, inner, exchange.rank, outer.inner_steps)

    store = open_store(str(tmp_path / "run"))
    settings = Elastic(1, grace=5.0, topology="sharded")
    (error,) = run_replicas(replica, [StoreExchange(store, 0, 1, settings, timing=timing)])
    assert isinstance(error, (CorruptedObjectError, StoreUnavailableError))
    assert "is a named pipe" in str(error)
    assert path.is_fifo()
