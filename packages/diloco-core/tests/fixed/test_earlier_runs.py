"""Test what processes and objects of earlier runs may not do to a fixed run."""

import keys_lab
import pytest
import torch
from simulated import Fault
from strict_lab import LOST_AFTER, Means, Run, in_folder
from training_lab import fill, identical

from diloco_core import (
    CorruptedObjectError,
    FencedError,
    RendezvousTimeoutError,
    ReplicaLostError,
    RunExistsError,
    StoreExchange,
    export,
)
from diloco_core._store._open import open_store


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


EMPTIED, BEGUN, WOKEN = 2500.0, 2600.0, 2601.0


class Frozen(Run):
    """Its model also holds what is not synced, which rank 0 uploads before the manifest."""

    def net(self):
        net = fill(torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)))
        net[0].bias.requires_grad_(False)
        return net


def used_again(run, operation, resume, ranks=2):
    """Rank 0 hangs at an operation until a new run trains under the same prefix.

    What it and the new run came to.
    """

    def empty():
        for key in list(run.store.objects):
            run.store.remove(key)

    late = [(0, 0.0, [Fault(0, 1, operation, "zombie", WOKEN)], resume)]
    others = [(rank, 0.0, [], resume) for rank in range(1, ranks)]
    new = [(rank, BEGUN, [], False) for rank in range(ranks)]
    results = run.simulate([*late, *others, *new], 0, events={EMPTIED: empty}, until=12)
    return results[0], results[ranks:]


@pytest.mark.parametrize(
    ("resume", "operations"),
    [
        (False, (20, 36)),
        (True, (10, 26)),
        pytest.param(False, (28, *range(31, 45)), marks=pytest.mark.slow),
        pytest.param(True, (16, *range(19, 40)), marks=pytest.mark.slow),
    ],
)
def test_nothing_of_the_new_run_changes(resume, operations, tmp_path):
    """It hangs anywhere after reading the manifest, except in the request that claims its rank."""
    expected = Frozen(2).live(until=12)
    for operation in operations:
        run = Frozen(2)
        if resume:
            run.live(until=1)
        late, new = used_again(run, operation, resume)
        assert isinstance(late, (RunExistsError, FencedError)), operation
        assert identical([*new, *expected]), operation
        folder = in_folder(run, tmp_path / str(operation))
        assert export(folder, tmp_path / "model") == 12, operation
        assert identical([*run.live(resume=True, until=13), *Frozen(2).live(until=13)]), operation


@pytest.mark.sampled
@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "operation", [7, 20, 33, 45, *(pytest.param(n, marks=pytest.mark.slow) for n in (13, 27))]
)
def test_wherever_it_hangs_no_other_model_comes_of_it(new_store, resume, operation):
    """It may also be a second process of its rank, if it has not joined a run by then."""
    run = Frozen(2, store=new_store())
    if resume:
        run.live(until=1)
    late, new = used_again(run, operation, resume)
    results = [late, *new]
    ended = [result for result in results if isinstance(result, dict)]
    named = (RunExistsError, FencedError, RendezvousTimeoutError, CorruptedObjectError)
    assert all(isinstance(result, (dict, *named)) for result in results), results
    assert not ended or identical(ended)
