"""A run keeps what it was begun with: every argument of the loop that all replicas must have in
common, one after another.
"""

import inspect
import itertools
from functools import partial

import pytest
import torch
from loop_lab import exchanges

from diloco_core import ConfigurationError, DiLoCo, MismatchError, Seconds
from diloco_core.testing import run_replicas

ADAM = partial(torch.optim.Adam, lr=0.1)
INT8 = {"codec": "int8"}
STATE = {"state_codec": "int8"}
TRIMMED = {"aggregate": "trimmed"}
GROUPS = {"outer_groups": 0.4}
# For every argument, settings with which a run is begun and other ones with which it is continued
CHANGES = {
    "sync_every": [({}, {"sync_every": 4})],
    "fragments": [({}, {"fragments": 2}), ({"fragments": 2}, {})],
    "outer_lr": [
        ({}, {"outer_lr": 0.5}),
        ({"outer_lr": 0.5}, {"outer_lr": lambda sync: 0.5}),
        ({"outer_lr": lambda sync: 0.5}, {"outer_lr": 0.5}),
    ],
    "outer_momentum": [({}, {"outer_momentum": 0.8})],
    "nesterov": [({}, {"nesterov": False})],
    "outer_optimizer": [({}, {"outer_optimizer": ADAM}), ({"outer_optimizer": ADAM}, {})],
    "outer_groups": [
        ({}, GROUPS),
        (GROUPS, {}),
        (GROUPS, {"outer_groups": 0.3}),
        (GROUPS, {"outer_groups": lambda sync: 0.4}),
    ],
    "buffers": [({}, {"buffers": "rank0"})],
    "init": [({}, {"init": "check"})],
    "flush": [({}, {"flush": "none"})],
    "delay": [({}, {"delay": 1}), ({"delay": 1}, {})],
    "alpha": [({}, {"alpha": 0.5}), ({"alpha": 0.5}, {}), ({"alpha": 0.5}, {"alpha": 0.25})],
    "codec": [({}, INT8), (INT8, {}), (INT8, {"codec": "e2m1"})],
    "error_feedback": [
        (INT8, {**INT8, "error_feedback": True}),
        ({**INT8, "error_feedback": True}, INT8),
        ({**INT8, "error_feedback": True}, {**INT8, "error_feedback": 0.9}),
        ({"codec": "topk64"}, {"codec": "topk64", "error_feedback": 0.9}),
    ],
    "weight": [
        ({}, {"weight": "steps"}),
        ({"weight": "steps"}, {}),
        ({"weight": "steps"}, {"weight": "tokens"}),
    ],
    "aggregate": [({}, TRIMMED), (TRIMMED, {})],
    "trim": [(TRIMMED, {**TRIMMED, "trim": 2}), ({**TRIMMED, "trim": 2}, TRIMMED)],
    "clip": [({}, {"clip": "median"}), ({"clip": "median"}, {})],
    "state_codec": [({}, STATE), (STATE, {}), (STATE, {"state_codec": "bf16"})],
    "full_state_every": [
        (STATE, {**STATE, "full_state_every": 7}),
        ({**STATE, "full_state_every": 7}, STATE),
    ],
}
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
    """What replicas come to that continue a run with other settings than it was begun with."""
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
    for before, after in CHANGES[name]:
        results = continued(kind, before, after)
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
