"""Outer parameter groups: outer settings of their own for parts of the model, compared with those of torch's optimizers."""

from functools import partial

import pytest
import torch
from delay_lab import exchanges
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from training_lab import fill, push, run

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    Elastic,
    ElasticExchange,
    ManagerExchange,
    MismatchError,
    MockManager,
    ObjectStoreExchange,
    export,
    in_process,
)
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas

KINDS = ["threads", "store", "sharded", "gather"]
SIZES = (5, 3, 8, 1)
# Numbers with few binary digits, so that neither torch's order of operations nor ours rounds anything.
RATES, MOMENTA = (0.25, 0.5, 1.0), (0.0, 0.25, 0.5)


def gradient(rank, step, number):
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
    whole = torch.randint(-8, 9, (SIZES[number],), generator=generator)
    return whole.double() / 16


def a_model():
    return torch.nn.ParameterList([torch.zeros(size, dtype=torch.float64) for size in SIZES])


def groups_of(model, members, settings):
    """The groups, given the number of the group of every parameter."""
    return [
        {"params": [p for p, member in zip(model, members, strict=True) if member == number], **own}
        for number, own in enumerate(settings)
    ]


def train(exchange, members, settings, fragments, steps, **options):
    model, reports = a_model(), []
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with DiLoCo(
        model,
        inner,
        exchange,
        sync_every=2 * fragments,
        fragments=fragments,
        outer_groups=groups_of(model, members, settings),
        flush="none",
        on_sync=reports.append,
        **options,
    ) as outer:
        for step in range(steps):
            for number, parameter in enumerate(model):
                parameter.grad = gradient(exchange.rank, step, number)
            inner.step()
        parts = [[int(named.name) for named in part.tensors] for part in outer._fragments]
        values = [copy for part in outer.state_dict()["fragments"] for copy in part["copy"]]
    return [parameter.detach().clone() for parameter in model], reports, parts, values


def by_torch(replicas, members, settings, defaults, parts, steps):
    """The same with one optimizer of torch's, whose parameters are stepped fragment by fragment."""
    model = a_model()
    optimizer = torch.optim.SGD(groups_of(model, members, settings), **defaults)
    learned = [[torch.zeros_like(p) for p in model] for _ in range(replicas)]
    for step in range(steps):
        for rank in range(replicas):
            for number in range(len(SIZES)):
                learned[rank][number] += gradient(rank, step, number)
        if step % 2 == 0:
            continue
        for number in parts[step // 2 % len(parts)]:
            model[number].grad = sum(each[number] for each in learned) / replicas
            for each in learned:
                each[number].zero_()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model]


@st.composite
def cases(draw):
    count = draw(st.integers(1, 3))
    rest = draw(st.permutations([*range(count), *(0,) * (len(SIZES) - count)]))
    setting = st.fixed_dictionaries(
        {},
        optional={
            "lr": st.sampled_from(RATES),
            "momentum": st.sampled_from(MOMENTA),
            "nesterov": st.booleans(),
        },
    )
    return rest, draw(st.lists(setting, min_size=count, max_size=count))


@given(cases(), st.sampled_from(KINDS), st.sampled_from([1, 2]), st.integers(1, 2))
@limits(max_examples=25)
def test_exactly_what_torch_makes_of_the_same_groups(case, kind, replicas, fragments):
    members, settings = case
    defaults = {"lr": 0.5, "momentum": 0.5, "nesterov": True}
    options = {"outer_lr": 0.5, "outer_momentum": 0.5}
    found = run(
        lambda exchange: train(exchange, members, settings, fragments, 6, **options),
        exchanges(kind, replicas),
    )
    wanted = by_torch(replicas, members, settings, defaults, found[0][2], 6)
    rates = tuple(own.get("lr", 0.5) for own in settings)
    for values, reports, *_ in found:
        assert all(torch.equal(a, b) for a, b in zip(values, wanted, strict=True))
        assert [r.outer_lr for r in reports] == [rates if len(rates) > 1 else rates[0]] * 3


MEMBERS = [0, 1, 0, 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [{"codec": "int8", "error_feedback": True}, {"delay": 1, "alpha": 0.5}, {"clip": "median"}],
    ids=lambda options: next(iter(options)),
)
def test_with_other_options_all_replicas_come_to_the_same_values(kind, options):
    settings = [{"lr": 0.25, "momentum": 0.0}, {"momentum": 0.6}]
    found = run(lambda each: train(each, MEMBERS, settings, 1, 6, **options), exchanges(kind, 3))
    threads = run(lambda each: train(each, MEMBERS, settings, 1, 6, **options), in_process(3))
    for *_, values in found:
        assert all(torch.equal(a, b) for a, b in zip(values, threads[0][3], strict=True))


@pytest.mark.parametrize("name", ["Adam", "NAdam", "SGD"])
def test_any_element_wise_optimizer_may_have_groups(name):
    """NAdam keeps numbers that depend on the settings of the group, and SGD without momentum keeps nothing."""
    factory = {
        "Adam": lambda given: torch.optim.Adam(given, lr=0.1),
        "NAdam": lambda given: torch.optim.NAdam(given, lr=0.1),
        "SGD": lambda given: torch.optim.SGD(given, lr=0.1),
    }[name]
    settings = {
        "Adam": [{"betas": (0.5, 0.9)}, {"lr": 0.01, "weight_decay": 0.1}],
        "NAdam": [{"momentum_decay": 0.5}, {"lr": 0.01}],
        "SGD": [{"momentum": 0.9}, {"lr": 0.01}],
    }[name]
    for kind in ("threads", "sharded"):
        found = run(
            lambda each: train(each, MEMBERS, settings, 1, 8, outer_optimizer=factory),
            exchanges(kind, 2),
        )
        model = a_model()
        optimizer = factory(groups_of(model, MEMBERS, settings))
        for first in range(0, 8, 2):
            for number, parameter in enumerate(model):
                learned = [gradient(r, s, number) for r in range(2) for s in (first, first + 1)]
                parameter.grad = sum(learned) / 2
            optimizer.step()
        for values, *_ in found:
            for mine, theirs in zip(values, model, strict=True):
                # Scalars are kept in single precision, as torch's optimizers keep them.
                assert torch.allclose(mine, theirs.detach(), rtol=1e-6)


@pytest.mark.parametrize("kind", ["store", "sharded", "gather"])
@pytest.mark.parametrize(
    "settings",
    [[{"lr": 0.25, "momentum": 0.0}, {"momentum": 0.6}], [{"momentum_decay": 0.5}, {"lr": 0.01}]],
    ids=["SGD", "NAdam"],
)
def test_a_run_that_is_resumed_comes_to_the_same_bits(kind, settings, tmp_path):
    nadam = {"outer_optimizer": lambda given: torch.optim.NAdam(given, lr=0.1)}
    options = nadam if "momentum_decay" in settings[0] else {}

    def meet(folder, *, resume):
        store = open_store(str(tmp_path / folder))
        if kind == "store":
            return [ObjectStoreExchange(store, rank, 2, resume=resume) for rank in range(2)]
        elastic = Elastic(2, topology=kind, publish_every=1)
        return [ElasticExchange(store, rank, 2, elastic) for rank in range(2)]

    def some(exchange, steps):
        model = a_model()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        groups = groups_of(model, MEMBERS, settings)
        with DiLoCo(model, inner, exchange, sync_every=2, outer_groups=groups, **options) as outer:
            for step in range(outer.inner_steps, steps):
                for number, parameter in enumerate(model):
                    parameter.grad = gradient(exchange.rank, step, number)
                inner.step()
        return torch.cat([parameter.detach() for parameter in model])

    whole = run(lambda each: some(each, 8), meet("whole", resume=False))
    run(lambda each: some(each, 4), meet("parts", resume=False))
    again = run(lambda each: some(each, 8), meet("parts", resume=True))
    assert all(torch.equal(values, whole[0]) for values in [*whole, *again])
    export(str(tmp_path / "parts"), tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    assert torch.equal(torch.cat([exported[str(n)] for n in range(len(SIZES))]), whole[0])


def test_a_group_without_momentum_publishes_none(tmp_path):
    store = open_store(str(tmp_path))
    settings = [{"momentum": 0.0}, {"momentum": 0.6}]
    run(
        lambda each: train(each, MEMBERS, settings, 1, 2),
        [ObjectStoreExchange(store, rank, 1) for rank in range(1)],
    )
    (newest,) = tmp_path.glob("state/00000001/*.safetensors")
    with safe_open(newest, "pt") as file:
        kept = {name: file.get_slice(name).get_shape() for name in file.keys() if "outer" in name}  # noqa: SIM118
    assert {name: shape for name, shape in kept.items() if "xxh3" not in name} == {
        "outer.1/momentum_buffer.1": [SIZES[1] + SIZES[3]]
    }


def test_a_saved_state_goes_on_where_it_was():
    settings = [{"lr": 0.25, "momentum": 0.0}, {"momentum": 0.6}]

    def loop(exchange, model, inner):
        groups = groups_of(model, MEMBERS, settings)
        return DiLoCo(model, inner, exchange, sync_every=2, outer_groups=groups)

    def some(exchange, model, inner, outer, steps):
        with outer:
            for step in steps:
                for number, parameter in enumerate(model):
                    parameter.grad = gradient(exchange.rank, step, number)
                inner.step()
            return outer.state_dict()

    def replica(exchanges_of, rank):
        model = a_model()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        whole = loop(exchanges_of[0][rank], model, inner)
        some(exchanges_of[0][rank], model, inner, whole, range(8))
        again = a_model()
        inner = torch.optim.SGD(again.parameters(), lr=1.0)
        first = loop(exchanges_of[1][rank], again, inner)
        state = some(exchanges_of[1][rank], again, inner, first, range(4))
        second = loop(exchanges_of[2][rank], again, inner)
        second.load_state_dict(state)
        some(exchanges_of[2][rank], again, inner, second, range(4, 8))
        return all(torch.equal(a, b) for a, b in zip(model, again, strict=True))

    made = [in_process(2) for _ in range(3)]
    assert run(lambda each: replica(made, each.rank), made[0]) == [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_of_one_group_is_changed_in_a_running_run(kind):
    def replica(exchange):
        model, reports = a_model(), []
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        groups = groups_of(model, MEMBERS, [{"lr": 0.25}, {"lr": 0.5}])
        with DiLoCo(
            model, inner, exchange, sync_every=1, outer_groups=groups, on_sync=reports.append
        ) as outer:
            for step in range(4):
                if exchange.rank == 1 and step == 1:
                    outer.set_outer_lr(2.0, group=0)
                    outer.set_outer_lr(0.125, group=1)
                    outer.set_outer_lr(1.0, group=0)
                if exchange.rank == 0 and step == 2:
                    outer.set_outer_lr(0.75, group=1)
                if step == 3:
                    outer.set_outer_lr(0.375)
                for number, parameter in enumerate(model):
                    parameter.grad = gradient(exchange.rank, step, number)
                inner.step()
        return [report.outer_lr for report in reports]

    wanted = [(0.25, 0.5), (1.0, 0.125), (1.0, 0.75), (0.375, 0.375)]
    assert run(replica, exchanges(kind, 2)) == [wanted, wanted]


def test_each_group_may_have_a_function_of_the_sync():
    settings = [{"lr": lambda sync: 1 / sync}, {"lr": 0.5}]
    *_, (_, reports, *_) = run(lambda each: train(each, MEMBERS, settings, 1, 6), in_process(2))
    assert [report.outer_lr for report in reports] == [(1.0, 0.5), (0.5, 0.5), (1 / 3, 0.5)]


def test_state_that_is_published_encoded():
    settings = [{"lr": 0.25, "momentum": 0.0}, {"momentum": 0.6}]
    options = {"state_codec": "int8", "full_state_every": 2}
    for kind in ("threads", "store"):
        found = run(
            lambda each: train(each, MEMBERS, settings, 1, 8, **options), exchanges(kind, 2)
        )
        first = found[0][0]
        for values, *_ in found:
            assert all(torch.equal(a, b) for a, b in zip(values, first, strict=True))


def lone(model=None, exchange=None, **options):
    model = model or torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return DiLoCo(model, inner, exchange or in_process(1)[0], sync_every=2, **options)


def test_one_group_is_what_the_arguments_say():
    """Nothing differs from a loop without groups: neither the settings nor what identifies its files."""
    model = fill(torch.nn.Linear(2, 3))
    plain = lone(model, outer_lr=0.4, outer_momentum=0.6)
    grouped = lone(model, outer_groups=[{"params": model, "lr": 0.4, "momentum": 0.6}])
    assert plain._settings == grouped._settings
    assert plain._schema() == grouped._schema()
    assert plain._fragments[0].fingerprint == grouped._fragments[0].fingerprint


def test_modules_parameters_and_lists_of_both():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    model[1].bias.requires_grad_(False)
    outer = lone(
        model,
        outer_groups=[
            {"params": [model[0].weight, [model[1]]], "lr": 0.5},
            {"params": iter([model[0].bias])},
        ],
    )
    tensors = {named.name: named.outer_group for named in outer._fragments[0].tensors}
    assert tensors == {"0.weight": 0, "0.bias": 1, "1.weight": 0}


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
        (lambda m: [{"params": m, "lr": -1.0}], r"outer_groups\[0\]: outer_lr must be positive"),
        (lambda m: [{"params": m, "momentum": 1.0}], r"outer_groups\[0\]: outer_momentum must be"),
        (lambda m: [{"params": m, "lr": lambda sync: 0}], r"outer_groups\[0\]: what outer_lr\(1\)"),
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


class WithoutRate(torch.optim.Optimizer):
    """Adds a fixed part of the gradient."""

    def __init__(self, given, part=0.5):
        super().__init__(given, {"part": part})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["part"] * parameter.grad)


@pytest.mark.parametrize("settings", [[{}], [{}, {"part": 0.25}]])
def test_an_optimizer_without_a_learning_rate(settings):
    members = [number % len(settings) for number in range(len(SIZES))]
    found = run(
        lambda each: train(each, members, settings, 1, 4, outer_optimizer=WithoutRate),
        in_process(2),
    )
    for _, reports, *_ in found:
        assert [report.outer_lr for report in reports] == [None, None]


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
        push(model, outer._optimizers[0], 0, 0)
        push(model, outer._optimizers[0], 0, 1)


def test_a_manager_steps_groups_too():
    settings = [{"lr": 0.25, "momentum": 0.0}, {"momentum": 0.5}]
    managers = [ManagerExchange(MockManager(e), rank=e.rank, world_size=2) for e in in_process(2)]
    found = run(lambda each: train(each, MEMBERS, settings, 1, 4, outer_lr=0.5), managers)
    wanted = by_torch(2, MEMBERS, settings, {"lr": 0.5, "momentum": 0.5, "nesterov": True},
                      found[0][2], 4)  # fmt: skip
    for values, *_ in found:
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(values, wanted, strict=True))


DIFFERENT = [
    (
        ([0, 1, 0, 1], [{"lr": 0.5}, {}]),
        ([0, 1, 0, 1], [{"lr": 0.25}, {}]),
        r"outer_groups\[0\].lr",
    ),
    (([0, 1, 0, 1], [{}, {}]), ([0, 1, 1, 1], [{}, {}]), "outer group"),
    (([0, 0, 0, 0], [{}]), ([0, 1, 1, 1], [{}, {}]), "outer_"),
]


@pytest.mark.parametrize("kind", ["threads", "store"])
@pytest.mark.parametrize(("one", "other", "name"), DIFFERENT)
def test_replicas_with_other_groups_are_refused_by_name(kind, one, other, name):
    def replica(exchange):
        train(exchange, *(one if exchange.rank == 0 else other), 1, 2)

    errors = run_replicas(replica, exchanges(kind, 2))
    mismatches = [str(error) for error in errors if isinstance(error, MismatchError)]
    assert mismatches
    for message in mismatches:
        assert any(part in message for part in (name.replace("\\", ""), "outer_groups"))


@pytest.mark.parametrize("kind", ["strict", "elastic"])
@pytest.mark.parametrize(("one", "other", "name"), DIFFERENT)
def test_a_run_is_not_resumed_with_other_groups(kind, one, other, name, tmp_path):
    def meet(*, resume):
        store = open_store(str(tmp_path))
        if kind == "strict":
            return [ObjectStoreExchange(store, 0, 1, resume=resume)]
        return [ElasticExchange(store, 0, 1, Elastic(1))]

    run(partial(_once, one), meet(resume=False))
    (error,) = run_replicas(partial(_once, other), meet(resume=True))
    assert isinstance(error, MismatchError)
    assert "outer_" in str(error) or "outer group" in str(error)


def _once(case, exchange):
    return train(exchange, *case, 1, 2)


def test_settings_that_change_while_the_run_goes_on_are_refused():
    model = torch.nn.Linear(2, 3)
    outer = lone(model, outer_groups=[{"params": model.weight}, {"params": model.bias}])
    outer._model.outer._parts[1]._optimizer.param_groups[0]["momentum"] = 0.1
    message = r"outer_groups\[1\].momentum is 0.1 for fragment 0"
    with pytest.raises(ConfigurationError, match=message):
        outer.__enter__()
