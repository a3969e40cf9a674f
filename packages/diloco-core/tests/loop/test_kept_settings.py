"""A run keeps what it was begun with: every argument that all replicas have in common."""

import inspect
import itertools
from functools import partial

import pytest
import torch
from loop_lab import exchanges

from diloco_core import ConfigurationError, DiLoCo, MismatchError, Seconds
from diloco_core.testing import run_replicas

pytestmark = pytest.mark.sampled

ADAM = partial(torch.optim.Adam, lr=0.1)
STATE = {"state_codec": "int8"}
TRIMMED = {"aggregate": "trimmed"}


def function(sync):
    return 0.5


# For every argument, values with which a run is begun and others with which it is continued; None
# where it is left out.
CHANGES = {
    "sync_every": [(None, 4)],
    "fragments": [(None, 2), (2, None)],
    "outer_lr": [(None, 0.5), (0.5, function), (function, 0.5)],
    "outer_momentum": [(None, 0.8)],
    "nesterov": [(None, False)],
    "outer_optimizer": [(None, ADAM), (ADAM, None)],
    "outer_groups": [(None, 0.4), (0.4, None), (0.4, 0.3), (0.4, function)],
    "buffers": [(None, "rank0")],
    "init": [(None, "check")],
    "flush": [(None, "none")],
    "delay": [(None, 1), (1, None)],
    "alpha": [(None, 0.5), (0.5, None), (0.5, 0.25)],
    "codec": [(None, "int8"), ("int8", None), ("int8", "e2m1")],
    "error_feedback": [(None, True), (True, None), (True, 0.9)],
    "weight": [(None, "steps"), ("steps", None), ("steps", "tokens")],
    "aggregate": [(None, "trimmed"), ("trimmed", None)],
    "trim": [(None, 2), (2, None)],
    "clip": [(None, "median"), ("median", None)],
    "state_codec": [(None, "int8"), ("int8", None), ("int8", "bf16")],
    "full_state_every": [(None, 7), (7, None)],
}
BESIDE = {"error_feedback": {"codec": "int8"}, "trim": TRIMMED, "full_state_every": STATE}
OWN = {"model", "inner_optimizer", "exchange", "stateful", "save_inner_every", "on_sync"}
MAY_CHANGE = {"sync_every", "flush"}  # in fixed runs
_places = itertools.count()


def train(options, syncs, exchange):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    inner = torch.optim.SGD(model.parameters(), lr=0.001)
    options = {"sync_every": 2, **options}
    if "outer_groups" in options:
        groups = [{"params": model[0], "lr": options["outer_groups"]}, {"params": model[1]}]
        options["outer_groups"] = groups
    with DiLoCo(model, inner, exchange, **options) as outer:
        while outer.committed < syncs:
            if options.get("weight") == "tokens":
                outer.count_tokens(1)
            model(torch.ones(1, 2)).sum().backward()
            inner.step()
            inner.zero_grad()
    return outer.committed


def continued(kind, before, after):
    """Return how replicas end that continue a run with other settings than it was begun with."""
    place = f"memory://kept/{next(_places)}"
    count = 5 if "aggregate" in before or "aggregate" in after else 1
    first, second = (
        exchanges(kind, count, place, resume=resume and kind == "store") for resume in (False, True)
    )
    begun = run_replicas(partial(train, before, 2), first)
    assert all(result in {2, 3} for result in begun), begun  # leaving syncs the other fragment
    return run_replicas(partial(train, after, 4), second)


def test_every_argument_is_here():
    assert {*CHANGES, *OWN} == set(inspect.signature(DiLoCo).parameters)


@pytest.mark.parametrize("kind", ["store", "elastic"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_run_that_is_continued_with_another(kind, name):
    for values in CHANGES[name]:
        given = ({} if value is None else {name: value} for value in values)
        results = continued(kind, *({**BESIDE.get(name, {}), **each} for each in given))
        if kind == "store" and name in MAY_CHANGE:
            assert set(results) == {4}, results
        elif name == "init":
            assert all(isinstance(result, ConfigurationError) for result in results), results
            why = "in an elastic run" if kind == "elastic" else "with resume="
            assert f"init='check' cannot be used {why}" in str(results[0])
        else:
            assert all(isinstance(result, MismatchError) for result in results), results
            told = f"{name}=", f"without {name},", f"with {name}["
            assert all(any(part in str(result) for part in told) for result in results), results
            advised = all(" pass " in str(result) or " leave " in str(result) for result in results)
            assert advised or name == "outer_groups", results


def test_a_run_that_began_with_a_check_goes_on_without_one():
    assert continued("store", {"init": "check"}, {}) == [4]


def test_a_run_keeps_whether_it_goes_by_the_time():
    for before, after in itertools.permutations([{}, {"sync_every": Seconds(0.01)}]):
        (error,) = continued("elastic", before, after)
        assert isinstance(error, MismatchError)
        assert "sync_every=" in str(error)


@pytest.mark.parametrize(
    ("options", "default"),
    [(STATE, {"full_state_every": 8}), ({"codec": "topk64"}, {"error_feedback": 0.95}),
     (TRIMMED, {"trim": 1})],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["store", "elastic"])
def test_what_is_left_out_is_the_default(kind, options, default):
    assert set(continued(kind, options, {**options, **default})) == {4}
