"""A run with fixed membership ends with the bytes of a run between threads, also if it was stopped
and resumed.
"""

import itertools

import pytest
import torch
from training_lab import fill, identical, push, run, values

from diloco_core import DiLoCo, MismatchError, Timing, in_process
from diloco_core._run._exchange import StoreExchange
from diloco_core._store._drivers._folder import FolderStore

LIMITS = Timing(join_timeout=60.0, sync_timeout=60.0, beat_interval=10.0, lost_after=600.0)
STEPS = 12


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(17, 19)
        self.norm = torch.nn.BatchNorm1d(19)
        self.last = torch.nn.Linear(19, 3)


class Overwriting(FolderStore):
    """A folder as a store that accepts conditional writes and ignores the condition."""

    def create(self, key, data):
        self.put(key, [data] if isinstance(data, bytes) else data)
        return True


@pytest.fixture(params=[FolderStore, Overwriting], ids=["deciding", "overwriting"])
def exchanges(request):
    """Return a maker of all ranks' exchanges over a folder, whose store can decide or not.

    Each rank has buffers of another size.
    """

    def make(folder, ranks, **options):
        stores = [request.param(str(folder)) for _ in range(ranks)]
        return [
            StoreExchange(store, rank, ranks, timing=LIMITS, chunk_bytes=256 << rank, **options)
            for rank, store in enumerate(stores)
        ]

    return make


def replica(exchange, last=STEPS, **options):
    """What the model holds after so many inner steps."""
    model = fill(Net())
    inner = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with DiLoCo(model, inner, exchange, **options) as outer:
        while outer.inner_steps < last:
            model.norm.running_mean.add_(1 + exchange.rank)
            push(model, inner, exchange.rank, outer.inner_steps)
    return values(model)


def trained(connections, last=STEPS, **options):
    return run(lambda each: replica(each, last, save_inner_every=1, **options), connections)


def threads(ranks, options):
    return run(lambda each: replica(each, **options), in_process(ranks, chunk_bytes=256))


OPTIONS = {
    "plain": {},
    "fragments": {"fragments": 2},
    "delay": {"delay": 1},
    "mixed": {"delay": 1, "alpha": 0.5},
    "codec": {"codec": "int8"},
    "weighed": {"weight": "steps"},
    "clipped": {"clip": "median"},
    "buffers of rank 0": {"buffers": "rank0"},
    "own buffers": {"buffers": "none"},
    "Adam": {"outer_optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.1)},
    "encoded state": {"state_codec": "bf16"},
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_they_are_those_of_threads(name, ranks, exchanges, tmp_path):
    options = {"sync_every": 4, **OPTIONS[name]}
    between_threads = threads(ranks, options)
    stored = trained(exchanges(tmp_path / "run", ranks), **options)
    assert identical([between_threads[0], stored[0]])
    if name != "own buffers":
        assert identical(stored)


@pytest.mark.parametrize("name", ["plain", "fragments", "own buffers", "Adam"])
@pytest.mark.parametrize("stops", [(4,), (6,), (4, 8)])
def test_they_are_those_of_a_run_that_was_not_stopped(name, stops, exchanges, tmp_path):
    options = {"sync_every": 4, "flush": "none", **OPTIONS[name]}
    whole = trained(exchanges(tmp_path / "whole", 2), **options)
    for incarnation, last in enumerate(itertools.chain(stops, [STEPS])):
        parts = trained(exchanges(tmp_path / "parts", 2, resume=bool(incarnation)), last, **options)
    assert [identical(pair) for pair in zip(whole, parts, strict=True)] == [True, True]


def test_when_it_is_resumed_sync_every_may_change_if_all_ranks_change_it(exchanges, tmp_path):
    trained(exchanges(tmp_path / "run", 2), 4, sync_every=4, flush="none")
    ends = trained(exchanges(tmp_path / "run", 2, resume=True), 8, sync_every=2)
    assert identical(ends)


def test_ranks_that_change_it_in_other_ways_are_told(exchanges, tmp_path):
    trained(exchanges(tmp_path / "run", 2), 4, sync_every=4, flush="none")
    with pytest.raises(BaseExceptionGroup) as caught:
        run(
            lambda each: replica(each, 12, sync_every=2 + 2 * each.rank),
            exchanges(tmp_path / "run", 2, resume=True),
        )
    assert any(
        isinstance(error, MismatchError) and "differ in setting 'sync_every'" in str(error)
        for error in caught.value.exceptions
    )
