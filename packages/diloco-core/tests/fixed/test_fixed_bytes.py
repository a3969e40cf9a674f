"""A fixed run ends with the bytes of a run between threads, also if it was resumed."""

import itertools
from functools import cache

import pytest
import torch
from strict_lab import STORES
from training_lab import fill, identical, push, run, values

from diloco_core import DiLoCo, StoreExchange, Timing, in_process

pytestmark = pytest.mark.sampled

LIMITS = Timing(join_timeout=60.0, sync_timeout=60.0, beat_interval=10.0, lost_after=600.0)
STEPS = 12


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(17, 19)
        self.norm = torch.nn.BatchNorm1d(19)
        self.convolution = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.double = torch.nn.Linear(9, 11, dtype=torch.float64)
        self.last = torch.nn.Linear(19, 3, dtype=torch.bfloat16)


@pytest.fixture(params=STORES)
def exchanges(request):
    """Makes all ranks' exchanges over a folder, whose store can decide or not."""

    def make(folder, ranks, **options):
        options |= {"timing": LIMITS, "chunk_bytes": 256}
        store = STORES[request.param]
        return [StoreExchange(store(str(folder)), rank, ranks, **options) for rank in range(ranks)]

    return make


def replica(exchange, last=STEPS, **options):
    """Return what the model holds after so many inner steps."""
    model = fill(Net())
    inner = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with DiLoCo(model, inner, exchange, **options) as outer:
        while outer.inner_steps < last:
            model.norm.running_mean.add_(1 + exchange.rank)
            if options.get("weight") == "tokens":
                outer.count_tokens(1 + exchange.rank + outer.inner_steps)
            push(model, inner, exchange.rank, outer.inner_steps)
    return values(model)


def trained(connections, last=STEPS, **options):
    return run(lambda each: replica(each, last, save_inner_every=1, **options), connections)


@cache
def threads(ranks, name):
    options = {"sync_every": 4, **OPTIONS[name]}
    return run(lambda each: replica(each, **options), in_process(ranks, chunk_bytes=256))


OPTIONS = {
    "plain": {},
    "fragments": {"fragments": 2},
    "delay": {"delay": 1},
    "mixed": {"delay": 1, "alpha": 0.5},
    "codec": {"codec": "int8"},
    "weighed": {"weight": "tokens", "fragments": 2},
    "feedback": {"codec": "e2m1", "error_feedback": True},
    "clipped": {"clip": "median"},
    "buffers of rank 0": {"buffers": "rank0"},
    "own buffers": {"buffers": "none"},
    "Adam": {"outer_optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.1)},
    "encoded state": {"state_codec": "bf16"},
}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_they_are_those_of_threads(name, ranks, exchanges, tmp_path):
    options = {"sync_every": 4, **OPTIONS[name]}
    between_threads = threads(ranks, name)
    stored = trained(exchanges(tmp_path / "run", ranks), **options)
    assert identical([between_threads[0], stored[0]])
    if name != "own buffers":
        assert identical(stored)


@pytest.mark.parametrize(
    "name", ["plain", "weighed", "feedback", "own buffers", "Adam", "mixed", "encoded state"]
)
@pytest.mark.parametrize("stops", [pytest.param((6,), marks=pytest.mark.slow), (4, 8)])
def test_they_are_those_of_a_run_that_was_not_stopped(name, stops, exchanges, tmp_path):
    options = {"sync_every": 4, "flush": "none", **OPTIONS[name]}
    whole = trained(exchanges(tmp_path / "whole", 2), **options)
    for incarnation, last in enumerate(itertools.chain(stops, [STEPS])):
        parts = trained(exchanges(tmp_path / "parts", 2, resume=bool(incarnation)), last, **options)
    assert [identical(pair) for pair in zip(whole, parts, strict=True)] == [True, True]
