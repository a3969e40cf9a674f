"""Outer settings of their own for parts of the model, compared with torch's optimizers."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from loop_lab import KINDS, STORES, exchanges, live, loop
from safetensors.torch import load_file
from training_lab import push, run

from diloco_core import ConfigurationError, DiLoCo, MismatchError, export
from diloco_core.testing import run_replicas

SIZES = (5, 3, 8, 1)


def gradient(rank, step, number):
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
    whole = torch.randint(-8, 9, (SIZES[number],), generator=generator)
    return whole.double() / 16


def a_model():
    return torch.nn.ParameterList([torch.zeros(size, dtype=torch.float64) for size in SIZES])


def groups_of(model, members, settings):
    """The groups, given the number of the group of every parameter."""
    return [
        {"params": [p for p, of in zip(model, members, strict=True) if of == number], **more}
        for number, more in enumerate(settings)
    ]


def train(exchange, members, settings, fragments, steps, **options):
    """The parameters at the end, the reports, and which parameters are in each fragment."""
    model, reports = a_model(), []
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options |= {"sync_every": 2 * fragments, "fragments": fragments, "flush": "none"}
    options |= {"outer_groups": groups_of(model, members, settings), "on_sync": reports.append}
    with DiLoCo(model, inner, exchange, **options) as outer:
        for step in range(steps):
            for number, parameter in enumerate(model):
                parameter.grad = gradient(exchange.rank, step, number)
            inner.step()
        copies = [part["copy"] for part in outer.state_dict()["fragments"]]
    held, numbers = [sum(map(len, part)) for part in copies], iter(range(len(SIZES)))
    parts = []  # the numbers of the parameters in each fragment, which are in order
    for size in held:
        part = []
        while sum(SIZES[number] for number in part) < size:
            part.append(next(numbers))
        parts.append(part)
    return [parameter.detach().clone() for parameter in model], reports, parts


# Numbers with few binary digits, so that neither torch's order of operations nor ours rounds
# anything.
RATES, MOMENTA = (0.25, 0.5, 1.0), (0.0, 0.25, 0.5)
MEMBERS = [0, 1, 0, 1]
SGD = [{"lr": 0.25, "momentum": 0.0}, {"momentum": 0.6}]


def by_torch(replicas, members, settings, parts, steps, make=None):
    """The same with one optimizer of torch's, whose parameters are stepped fragment by fragment."""
    model = a_model()
    make = make or (lambda given: torch.optim.SGD(given, lr=0.5, momentum=0.5, nesterov=True))
    optimizer = make(groups_of(model, members, settings))
    learned = [[torch.zeros_like(p) for p in model] for _ in range(replicas)]
    for step in range(steps):
        for rank in range(replicas):
            for number in range(len(SIZES)):
                learned[rank][number] += gradient(rank, step, number)
        if step % 2 == 0:
            continue
        for number in parts[step // 2 % len(parts)]:
            model[number].grad = sum(deltas[number] for deltas in learned) / replicas
            for deltas in learned:
                deltas[number].zero_()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model]


@st.composite
def cases(draw):
    count = draw(st.integers(1, 3))
    rest = draw(st.permutations([*range(count), *(0,) * (len(SIZES) - count)]))
    optional = {"lr": st.sampled_from(RATES), "momentum": st.sampled_from(MOMENTA)}
    optional["nesterov"] = st.booleans()
    setting = st.fixed_dictionaries({}, optional=optional).filter(
        lambda own: own.get("momentum", 1) or not own.get("nesterov")  # it is refused
    )
    return rest, draw(st.lists(setting, min_size=count, max_size=count))


@given(cases(), st.sampled_from([*KINDS, "manager"]), st.sampled_from([1, 2]), st.integers(1, 2))
@limits(max_examples=25)
def test_exactly_what_torch_makes_of_the_same_groups(case, kind, replicas, fragments):
    members, settings = case
    options = {
        f"outer_{name}": 0.5
        for name in ("lr", "momentum")
        if not all(name in setting for setting in settings)  # it is refused
    }
    results = run(
        lambda exchange: train(exchange, members, settings, fragments, 6, **options),
        exchanges(kind, replicas),
    )
    wanted = by_torch(replicas, members, settings, results[0][2], 6)
    rates = tuple(setting.get("lr", 0.5) for setting in settings)
    for values, reports, _ in results:
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(values, wanted, strict=True))
        if kind != "manager":
            assert all(torch.equal(a, b) for a, b in zip(values, wanted, strict=True))
        assert [r.outer_lr for r in reports] == [rates if len(rates) > 1 else rates[0]] * 3


MADE = {
    "Adam": (lambda given: torch.optim.Adam(given, lr=0.1),
             [{"betas": (0.5, 0.9)}, {"lr": 0.01, "weight_decay": 0.1}]),
    "NAdam": (lambda given: torch.optim.NAdam(given, lr=0.1),
              [{"momentum_decay": 0.5}, {"lr": 0.01}]),
    "SGD": (lambda given: torch.optim.SGD(given, lr=0.1), [{"momentum": 0.9}, {"lr": 0.01}]),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("name", MADE)
def test_any_element_wise_optimizer_may_have_groups(name):
    """NAdam keeps numbers that depend on the group's settings; SGD without momentum keeps none."""
    factory, settings = MADE[name]
    for kind in ("threads", "sharded"):
        results = run(
            lambda each: train(each, MEMBERS, settings, 1, 8, outer_optimizer=factory),
            exchanges(kind, 2),
        )
        wanted = by_torch(2, MEMBERS, settings, results[0][2], 8, factory)
        for values, *_ in results:
            for mine, theirs in zip(values, wanted, strict=True):
                # Scalars are kept in single precision, as torch's optimizers keep them.
                assert torch.allclose(mine, theirs, rtol=1e-6)


def some(exchange, settings, steps, saved=None, **options):
    """Train up to a step; return the parameters and the state."""
    model = a_model() if saved is None else saved[0]
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    groups = groups_of(model, MEMBERS, settings)
    _, _, outer, _ = loop(exchange, model, inner, outer_groups=groups, **options)
    if saved:
        outer.load_state_dict(saved[1])
    with outer:
        for step in range(outer.inner_steps, steps):
            for number, parameter in enumerate(model):
                parameter.grad = gradient(exchange.rank, step, number)
            inner.step()
        return model, outer.state_dict()


def flat(results):
    return [torch.cat([parameter.detach() for parameter in model]) for model, _ in results]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("name", ["the usual", "NAdam"])
def test_a_run_that_is_resumed_comes_to_the_same_bits(kind, name, tmp_path):
    factory, settings = MADE.get(name, (None, SGD))
    published = {"publish_every": 1} if kind == "gather" else {}

    def train_to(steps, folder, *, resume=False):
        each = exchanges(kind, 2, tmp_path / folder, resume=resume, **published)
        return flat(run(lambda one: some(one, settings, steps, outer_optimizer=factory), each))

    whole = train_to(8, "whole")
    train_to(4, "parts")
    again = train_to(8, "parts", resume=True)
    assert all(torch.equal(values, whole[0]) for values in [*whole, *again])
    export(str(tmp_path / "parts"), tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    assert torch.equal(torch.cat([exported[str(n)] for n in range(len(SIZES))]), whole[0])


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_of_one_group_is_changed_in_a_running_run(kind):
    def replica(exchange):
        model = a_model()
        groups = groups_of(model, MEMBERS, [{"lr": 0.25}, {"lr": 0.5}])
        _, inner, outer, reports = loop(exchange, model, outer_groups=groups, sync_every=1)
        with outer:
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


def test_one_group_is_what_the_arguments_say(tmp_path):
    """A run that was begun without groups goes on with one that says the same."""
    for resume in (False, True):
        model = torch.nn.Linear(2, 3)
        setting = {"lr": 0.4, "momentum": 0.6}
        options = {"outer_lr": 0.4, "outer_momentum": 0.6}
        if resume:
            options = {"outer_groups": [{"params": model, **setting}]}
        (exchange,) = exchanges("store", 1, tmp_path, resume=resume)
        model, inner, outer, _ = loop(exchange, model, **options)
        live(model, inner, outer, *range(2))
    assert outer.committed == 2


def test_modules_parameters_and_lists_of_both(lab):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    model[1].bias.requires_grad_(False)
    first = {"params": [model[0].weight, [model[1]]], "lr": 0.5}
    second = {"params": iter([model[0].bias]), "lr": 0.25}
    options = {"outer_groups": [first, second], "outer_momentum": 0.0, "sync_every": 1}
    before = lab.values(model)
    _, inner, outer, _ = loop(None, model, **options)
    with outer:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        inner.step()
    moved = {name: float((before[name] - value).max()) for name, value in lab.values(model).items()}
    assert moved == pytest.approx({"0.weight": 0.5, "0.bias": 0.25, "1.weight": 0.5, "1.bias": 0})


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


def own(**settings):
    return lambda m: [{"params": m, **settings}]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (lambda m: [], "must be a list of groups.* not an empty list"),
        (lambda m: {"params": m}, "must be a list of groups"),
        (lambda m: [m], r"outer_groups\[0\] is a?.*Sequential.*, but every group must be a map"),
        (lambda m: [{"lr": 0.5}], r'outer_groups\[0\] has no "params"'),
        (lambda m: [{"params": "0.weight"}], r'"params" of outer_groups\[0\] must be parameters'),
        (lambda m: [{"params": set(m.parameters())}], "a set has none"),
        (lambda m: [{"params": [torch.zeros(2)]}], "must be parameters or modules"),
        (lambda m: [{"params": m}, {"params": torch.nn.Linear(7, 1)}], r"\[1, 7\] that is not"),
        (lambda m: [{"params": m}, {"params": []}], r"outer_groups\[1\] holds no trainable"),
        (lambda m: [{"params": m[0]}], "in no group of outer_groups: '1.weight', '1.bias'"),
        (lambda m: [{"params": m}, {"params": m[1].bias}], r"'1.bias' is in outer_groups\[0\] and"),
        (own(lr=-1.0), r"outer_groups\[0\]: lr must be positive"),
        (own(momentum=1.0), r"outer_groups\[0\]: momentum must be"),
        (own(momentum=0.0, nesterov=True), r"outer_groups\[0\]: .* with momentum=0: leave"),
        (own(lr=lambda sync: 0), r"outer_groups\[0\]: what lr\(1\)"),
        (own(momentun=0.5), r"outer_groups\[0\]: 'momentun' is not a sett"),
        (own(weight_decay=0.5), "'weight_decay' is not a setting"),
        (lambda m: [{"params": p} for p in m.parameters()] * 3, "12 groups, .* at most 8"),
    ],
)
def test_groups_that_do_not_fit(groups, message):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    with pytest.raises(ConfigurationError, match=message):
        loop(None, model, outer_groups=groups(model))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("outer_lr", 0.5),
        ("outer_lr", lambda sync: 0.5),
        ("outer_momentum", 0.5),
        ("nesterov", True),
    ],
)
def test_what_every_group_has_of_its_own_is_refused_beside_them(name, value):
    """A group that leaves it out is as the argument says."""
    model = torch.nn.Linear(2, 3)
    rates = {"lr": 0.25, "momentum": 0.25, "nesterov": False}
    groups = [{"params": model.weight, **rates}, {"params": model.bias, **rates}]
    loop(None, model, outer_groups=groups)
    with pytest.raises(ConfigurationError, match=rf"{name}=.* has no effect, since every group"):
        loop(None, model, outer_groups=groups, **{name: value})
    del groups[1][name.removeprefix("outer_")]
    loop(None, model, outer_groups=groups, **{name: value})


def test_groups_that_do_not_fit_the_optimizer_of_the_caller():
    model = torch.nn.Linear(2, 3)
    for settings, message in [
        ({"lr_": 1.0}, r"outer_groups\[0\]: 'lr_' is not a setting of the outer optimizer, which"),
        ({"maximize": True}, r"outer_groups\[0\]: .*maximize=True"),
    ]:
        groups = [{"params": model, **settings}]
        with pytest.raises(ConfigurationError, match=message):
            loop(None, model, outer_optimizer=adam, outer_groups=groups)

    def several(parameters):
        return torch.optim.SGD([{"params": parameters}, {"params": []}], lr=0.1)

    with pytest.raises(ConfigurationError, match="pass outer_groups"):
        loop(outer_optimizer=several)


def test_a_tied_parameter_is_in_one_group():
    embedding, head = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False)
    head.weight = embedding.weight
    model = torch.nn.Sequential(embedding, head)
    with pytest.raises(ConfigurationError, match=r"'0\.weight' is in outer_groups.* tied"):
        loop(None, model, outer_groups=[{"params": embedding}, {"params": head}])
    assert loop(None, model, outer_groups=[{"params": [embedding, head]}])


def test_the_rate_of_a_group_that_cannot_be_changed():
    model = torch.nn.Linear(2, 3)
    groups = [{"params": model.weight, "lr": lambda sync: 0.5}, {"params": model.bias}]
    _, inner, outer, _ = loop(None, model, outer_groups=groups)
    with outer:
        for group, message in [(2, "0 to 1"), *((g, "group must be") for g in (-1, "0", True))]:
            with pytest.raises(ConfigurationError, match=message):
                outer.set_outer_lr(0.5, group=group)
        with pytest.raises(ConfigurationError, match="a function of the sync, and a change fixes"):
            outer.set_outer_lr(0.5, group=1)
        outer.set_outer_lr(0.5, group=0)
        outer.set_outer_lr(0.5)
        for step in range(2):
            push(model, inner, 0, step)


# Resumed runs with other groups are among the kept settings.
DIFFERENT = [
    ([0, 1, 0, 1], [{"lr": 0.5}, {}], [0, 1, 0, 1], [{"lr": 0.25}, {}], "'outer_groups[0].lr'"),
    ([0, 1, 0, 1], [{}, {}], [0, 1, 1, 1], [{}, {}], "with the same outer_groups"),
    ([0, 0, 0, 0], [{}], [0, 1, 1, 1], [{}, {}], "'outer_groups'"),
]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["threads", "store"])
@pytest.mark.parametrize(("one", "own", "other", "theirs", "text"), DIFFERENT)
def test_replicas_with_other_groups_are_refused_by_name(kind, one, own, other, theirs, text):
    def replica(exchange):
        train(exchange, *((one, own) if exchange.rank == 0 else (other, theirs)), 1, 2)

    errors = run_replicas(replica, exchanges(kind, 2))
    mismatches = [str(error) for error in errors if isinstance(error, MismatchError)]
    assert mismatches
    assert all(text in message for message in mismatches)
