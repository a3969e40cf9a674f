"""What processes and objects of other runs may not do to a fixed run.

Prefixes that are used again: ``test_emptied_prefixes``.
"""

import shutil

import keys_lab
import pytest
import torch
from safetensors.torch import load_file
from strict_lab import LOST_AFTER, Means

from diloco_core import (
    CorruptedObjectError,
    DiLoCo,
    ReplicaLostError,
    RunExistsError,
    StoreExchange,
    export,
)
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas


def test_beats_of_another_run_are_no_signs_of_life(new_store):
    run = Means(2, store=new_store())

    def before(process, kind, key):
        if process.rank == 1 and kind == "put" and keys_lab.of("contribution", sync=2)(key):
            process.die()

    def beat(count):
        (key,) = keys_lab.keys_of(run.store.objects, "beat", rank=1)
        run.store.write(key, f"{32 * 'd'} 10.0 1 {count}".encode())

    run.before = before
    processes = [(rank, 0.0, [], False) for rank in range(2)]
    events = {10.0 * count: lambda count=count: beat(count) for count in range(1, 11)}
    result, _ = run.simulate(processes, events=events, until=2)
    with pytest.raises(ReplicaLostError, match=r"rank 1 has shown no sign of life for 10[0-9] s"):
        raise result
    assert LOST_AFTER < run.ended[0] < LOST_AFTER + 20.0


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
    """Also where they are those of the same model after the same sync, under the names that they
    would have here.
    """
    weight = history(lab, tmp_path / "one", 10)
    history(lab, tmp_path / "other", 20)
    one, other = tmp_path / "one" / "run", tmp_path / "other" / "run"
    key = keys_lab.state_key(2, 1)
    export(str(one), tmp_path / "model")
    assert torch.equal(load_file(tmp_path / "model")["weight"], weight)
    shutil.copy(other / key, one / key)
    with pytest.raises(CorruptedObjectError, match="00001"):
        export(str(one), tmp_path / "model", at=2)


@pytest.mark.parametrize("error", [RuntimeError("the data is missing"), RunExistsError("taken")])
@pytest.mark.parametrize("is_taken", [False, True], ids=["free", "taken"])
def test_who_fails_before_it_has_joined_speaks_for_no_other_process(tmp_path, error, is_taken):
    """Its note would end the run of the process that holds the rank."""
    store = open_store(str(tmp_path))
    if is_taken:
        store.put(keys_lab.claim_key(1), [b"another process holds the rank"])
    StoreExchange(open_store(str(tmp_path)), 1, 2).abort(error)
    told = not is_taken and isinstance(error, RuntimeError)
    notes = keys_lab.keys_of(store.list(""), "note")
    assert notes == (["deltas/00000001/hint.00001.0000.leave"] if told else [])
