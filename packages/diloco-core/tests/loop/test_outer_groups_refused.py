"""Outer parameter groups that do not fit the model, the outer optimizer, the other replicas or the
run are refused.
"""

from functools import partial

import pytest
import torch
from delay_lab import exchanges
from groups_lab import lone, train
from training_lab import push, run

from diloco_core import (
    ConfigurationError,
    Elastic,
    MismatchError,
    StoreExchange,
)
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(3, 2)
        self.head = torch.nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (lambda m: [], "must be a list of groups.* not an empty list"),
        (lambda m: {"params": m}, "must be a list of groups"),
        (
            lambda m: [m],
            r"outer_groups\[0\] is a?.*Sequential.*, but every group must be a mapping",
        ),
        (lambda m: [{"lr": 0.5}], r'outer_groups\[0\] has no "params"'),
        (lambda m: [{"params": "0.weight"}], r'"params" of outer_groups\[0\] must be parameters'),
        (lambda m: [{"params": set(m.parameters())}], "a set has none"),
        (lambda m: [{"params": [torch.zeros(2)]}], "must be parameters or modules"),
        (
            lambda m: [{"params": m}, {"params": torch.nn.Linear(7, 1)}],
            r"shape \[1, 7\] that is not",
        ),
        (lambda m: [{"params": m}, {"params": []}], r"outer_groups\[1\] holds no trainable"),
        (lambda m: [{"params": m[0]}], "in no group of outer_groups: '1.weight', '1.bias'"),
        (
            lambda m: [{"params": m}, {"params": m[1].bias}],
            r"'1.bias' is in outer_groups\[0\] and in outer_groups\[1\]",
        ),
        (lambda m: [{"params": m, "lr": -1.0}], r"outer_groups\[0\]: lr must be positive"),
        (lambda m: [{"params": m, "momentum": 1.0}], r"outer_groups\[0\]: momentum must be"),
        (lambda m: [{"params": m, "lr": lambda sync: 0}], r"outer_groups\[0\]: what lr\(1\)"),
        (
            lambda m: [{"params": m, "momentun": 0.5}],
            r"outer_groups\[0\]: 'momentun' is not a sett",
        ),
        (lambda m: [{"params": m, "weight_decay": 0.5}], "'weight_decay' is not a setting"),
        (lambda m: [{"params": p} for p in m.parameters()] * 3, "12 groups, .* at most 8"),
    ],
)
def test_what_does_not_fit(groups, message):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    with pytest.raises(ConfigurationError, match=message):
        lone(model, outer_groups=groups(model))


def test_a_tied_parameter_is_in_one_group():
    model = Tied()
    with pytest.raises(ConfigurationError, match=r"'embedding\.weight' is in outer_groups.* tied"):
        lone(model, outer_groups=[{"params": model.embedding}, {"params": model.head}])
    assert lone(model, outer_groups=[{"params": [model.embedding, model.head]}])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"lr_": 1.0},
            r"outer_groups\[0\]: 'lr_' is not a setting of the outer optimizer, which has",
        ),
        ({"maximize": True}, r"outer_groups\[0\]: .*maximize=True"),
    ],
)
def test_settings_that_the_optimizer_of_the_caller_does_not_take(setting, message):
    model = torch.nn.Linear(2, 3)

    def adam(given):
        return torch.optim.Adam(given, lr=0.1)

    with pytest.raises(ConfigurationError, match=message):
        lone(model, outer_optimizer=adam, outer_groups=[{"params": model, **setting}])


def test_an_optimizer_that_makes_groups_by_itself_is_told_how():
    def several(parameters):
        return torch.optim.SGD([{"params": parameters}, {"params": []}], lr=0.1)

    with pytest.raises(ConfigurationError, match="pass outer_groups"):
        lone(outer_optimizer=several)


@pytest.mark.parametrize(
    ("group", "message"),
    [(2, "0 to 1"), (-1, "group must be"), ("0", "group must be"), (True, "group must be")],
)
def test_there_is_such_a_group(group, message):
    model = torch.nn.Linear(2, 3)
    groups = [{"params": model.weight}, {"params": model.bias}]
    with (
        lone(model, outer_groups=groups) as outer,
        pytest.raises(ConfigurationError, match=message),
    ):
        outer.set_outer_lr(0.5, group=group)


def test_the_rate_of_one_group_is_not_changed_beside_a_function():
    model = torch.nn.Linear(2, 3)
    groups = [{"params": model.weight, "lr": lambda sync: 0.5}, {"params": model.bias}]
    with lone(model, outer_groups=groups) as outer:
        with pytest.raises(ConfigurationError, match="a function of the sync, and a change fixes"):
            outer.set_outer_lr(0.5, group=1)
        outer.set_outer_lr(0.5, group=0)
        outer.set_outer_lr(0.5)
        push(model, outer._inner.steps.optimizers[0], 0, 0)
        push(model, outer._inner.steps.optimizers[0], 0, 1)


DIFFERENT = [
    (
        ([0, 1, 0, 1], [{"lr": 0.5}, {}]),
        ([0, 1, 0, 1], [{"lr": 0.25}, {}]),
        (
            "'outer_groups[0].lr'",
            "with outer_groups[0] whose lr is 0.5, but rank 0 was given one whose lr is 0.25",
        ),
    ),
    (
        ([0, 1, 0, 1], [{}, {}]),
        ([0, 1, 1, 1], [{}, {}]),
        ("with the same outer_groups", "with other outer_groups than those that rank 0 was given"),
    ),
    (
        ([0, 0, 0, 0], [{}]),
        ([0, 1, 1, 1], [{}, {}]),
        (
            "'outer_groups'",
            "without outer_groups, but rank 0 was given outer_groups=[{...}, {...}]",
        ),
    ),
]


@pytest.mark.parametrize("kind", ["threads", "store"])
@pytest.mark.parametrize(("one", "other", "told"), DIFFERENT)
def test_replicas_with_other_groups_are_refused_by_name(kind, one, other, told):
    def replica(exchange):
        train(exchange, *(one if exchange.rank == 0 else other), 1, 2)

    errors = run_replicas(replica, exchanges(kind, 2))
    mismatches = [str(error) for error in errors if isinstance(error, MismatchError)]
    assert mismatches
    for message in mismatches:
        assert told[0] in message


@pytest.mark.parametrize("kind", ["fixed", "elastic"])
@pytest.mark.parametrize(("one", "other", "told"), DIFFERENT)
def test_a_run_is_not_resumed_with_other_groups(kind, one, other, told, tmp_path):
    def meet(*, resume):
        store = open_store(str(tmp_path))
        if kind == "fixed":
            return [StoreExchange(store, 0, 1, resume=resume)]
        return [StoreExchange(store, 0, 1, Elastic(1))]

    run(partial(_once, one), meet(resume=False))
    (error,) = run_replicas(partial(_once, other), meet(resume=True))
    assert isinstance(error, MismatchError)
    assert told[1] in str(error)


def _once(case, exchange):
    return train(exchange, *case, 1, 2)


def test_settings_that_change_while_the_run_goes_on_are_refused():
    model = torch.nn.Linear(2, 3)
    outer = lone(model, outer_groups=[{"params": model.weight}, {"params": model.bias}])
    outer._model.outer._parts[1].optimizer.param_groups[0]["momentum"] = 0.1
    message = r"outer_groups\[1\].momentum is 0.1 for fragment 0"
    with pytest.raises(ConfigurationError, match=message):
        outer.__enter__()
