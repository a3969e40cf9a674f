"""Outer parameter groups: outer settings of their own for parts of the model, compared with those
of torch's optimizers.
"""

import pytest
import torch
from delay_lab import exchanges
from groups_lab import SIZES, a_model, gradient, groups_of, lone, train
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from training_lab import fill, run

from diloco_core import (
    DiLoCo,
    Elastic,
    ManagerExchange,
    MockManager,
    StoreExchange,
    export,
    in_process,
)
from diloco_core._store._open import open_store

KINDS = ["threads", "store", "sharded", "gather"]
# Numbers with few binary digits, so that neither torch's order of operations nor ours rounds
# anything.
RATES, MOMENTA = (0.25, 0.5, 1.0), (0.0, 0.25, 0.5)


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
    ).filter(lambda own: own.get("momentum", 1) or not own.get("nesterov"))  # it is refused
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
    """NAdam keeps numbers that depend on the group's settings; SGD without momentum keeps none."""
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
            return [StoreExchange(store, rank, 2, resume=resume) for rank in range(2)]
        elastic = Elastic(2, topology=kind, publish_every=1 if kind == "gather" else None)
        return [StoreExchange(store, rank, 2, elastic) for rank in range(2)]

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
        [StoreExchange(store, rank, 1) for rank in range(1)],
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
    for kind, more in (("threads", {}), ("store", {"full_state_every": 2})):

        def replica(each, more=more):
            return train(each, MEMBERS, settings, 1, 8, state_codec="int8", **more)

        found = run(replica, exchanges(kind, 2))
        first = found[0][0]
        for values, *_ in found:
            assert all(torch.equal(a, b) for a, b in zip(values, first, strict=True))


def test_one_group_is_what_the_arguments_say():
    """Settings and what identifies its files are those of a loop without groups."""
    model = fill(torch.nn.Linear(2, 3))
    plain = lone(model, outer_lr=0.4, outer_momentum=0.6)
    grouped = lone(model, outer_groups=[{"params": model, "lr": 0.4, "momentum": 0.6}])
    assert plain._model.settings == grouped._model.settings
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


def test_a_manager_steps_groups_too():
    settings = [{"lr": 0.25, "momentum": 0.0}, {"momentum": 0.5}]
    managers = [ManagerExchange(MockManager(e), rank=e.rank, world_size=2) for e in in_process(2)]
    found = run(lambda each: train(each, MEMBERS, settings, 1, 4, outer_lr=0.5), managers)
    wanted = by_torch(2, MEMBERS, settings, {"lr": 0.5, "momentum": 0.5, "nesterov": True},
                      found[0][2], 4)  # fmt: skip
    for values, *_ in found:
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(values, wanted, strict=True))
