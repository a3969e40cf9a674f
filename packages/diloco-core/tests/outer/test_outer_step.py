"""The outer step is torch's own on the mean pseudo-gradient, in at least fp32."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loop_lab import exchanges, loop
from torch import nn

from diloco_core import DiLoCo, in_process

OPTIMIZERS = {
    "plain SGD": (torch.optim.SGD, {"lr": 0.7}),
    "heavy ball": (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9}),
    "Nesterov": (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    "fused": (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True, "fused": True}),
    "weight decay": (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "weight_decay": 0.01}),
    "dampening": (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "dampening": 0.5}),
    "Adam": (torch.optim.Adam, {"lr": 0.1}),
    "AMSGrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "betas": (0.8, 0.95)}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "t0": 2}),
}


def factory(name):
    kind, options = OPTIMIZERS[name]
    return lambda parameters: kind(parameters, **options)


def start_values(shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def movement(rank, step, number, shape):
    """Return how far an inner step takes a parameter."""
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * step + number)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def reference(name, shapes, replicas, steps):
    """DiLoCo written down plainly: one parameter is synced after every inner step, in turn."""
    parameters = [nn.Parameter(value) for value in start_values(shapes)]
    outers = [factory(name)([parameter]) for parameter in parameters]
    local = [[parameter.detach().clone() for parameter in parameters] for _ in range(replicas)]

    def sync(number):
        parameter = parameters[number]
        deltas = [parameter.detach() - own[number] for own in local]
        parameter.grad = sum(deltas[1:], deltas[0].clone()) / replicas
        outers[number].step()
        for own in local:
            own[number].copy_(parameter.detach())

    for step in range(steps):
        for rank, own in enumerate(local):
            for number, shape in enumerate(shapes):
                own[number] -= movement(rank, step, number, shape)
        sync(step % len(shapes))
    # At the end the flush syncs all fragments but the one just synced.
    for turn in range(steps, steps + len(shapes) - 1):
        sync(turn % len(shapes))
    return [parameter.detach() for parameter in parameters]


def ours(name, shapes, steps):
    def replica(exchange):
        model = nn.ParameterList(start_values(shapes))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        fragments = len(shapes)
        options = {"sync_every": fragments, "fragments": fragments}
        with DiLoCo(model, inner, exchange, outer_optimizer=factory(name), **options):
            for step in range(steps):
                for number, parameter in enumerate(model):
                    parameter.grad = movement(exchange.rank, step, number, parameter.shape)
                inner.step()
        return [parameter.detach() for parameter in model]

    return replica


@pytest.mark.sampled
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@settings(deadline=None, max_examples=5)
@given(
    shapes=st.lists(
        st.lists(st.integers(1, 6), max_size=3).map(tuple) | st.tuples(st.integers(1, 90)),
        min_size=1,
        max_size=3,
    ),
    replicas=st.integers(1, 4),
    chunk_bytes=st.sampled_from([8, 24, 100, 200, 2**20]),
    steps=st.integers(1, 7),
)
# Shards that cut through parameters.
@example(shapes=[(7, 5), (40,)], replicas=3, chunk_bytes=100, steps=6)
def test_the_outer_step_is_torchs_own_on_the_mean_pseudo_gradient(
    lab, name, shapes, replicas, chunk_bytes, steps
):
    wanted = reference(name, shapes, replicas, steps)
    runs = lab.run(ours(name, shapes, steps), in_process(replicas, chunk_bytes=chunk_bytes))
    for run in runs:
        for mine, theirs in zip(run, wanted, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)
        assert all(map(torch.equal, run, runs[0])), "all replicas hold the same bytes"


@pytest.mark.sampled
@pytest.mark.parametrize("chunk_bytes", [128, 333, 1000, 4096])
def test_the_numbers_do_not_depend_on_the_chunk_size(lab, chunk_bytes):
    """Vectorised kernels round tails differently: chunks must not move them about."""

    def make(rank):
        return lab.fill(nn.Linear(70, 31))

    wanted = lab.train(make, in_process(3))
    assert lab.identical([*lab.train(make, in_process(3, chunk_bytes=chunk_bytes)), *wanted])


def one_weight(exchange, dtype, lr):
    """A model of one tensor of ones, and its loop with plain outer steps."""
    model = nn.ParameterList([torch.ones(4, dtype=dtype)])
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"sync_every": 1, "outer_lr": lr, "outer_momentum": 0.0}
    return model, inner, DiLoCo(model, inner, exchange, **options)


def move(model, inner, distance):
    """An inner step by ``distance``."""
    model[0].grad = torch.full_like(model[0], -distance)
    inner.step()


def global_copy(outer):
    return outer.state_dict()["fragments"][0]["copy"][0].clone()


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["threads", "store"])
def test_outer_steps_too_small_for_the_model_add_up(lab, dtype, kind):
    """A hundred outer steps, each a tenth of what the model's dtype can show."""
    ulp = torch.finfo(dtype).eps

    def replica(exchange):
        model, inner, outer = one_weight(exchange, dtype, 0.1)
        with outer:
            for _ in range(100):
                move(model, inner, ulp)
            return global_copy(outer), model[0].detach().clone()

    for copy, weight in lab.run(replica, exchanges(kind, 2)):
        assert copy.dtype is torch.float32
        assert torch.allclose(copy, torch.full((4,), 1 + 10 * ulp), rtol=0, atol=ulp / 10)
        assert torch.equal(weight, copy.to(dtype))


def test_movements_that_cancel_in_the_models_dtype_do_not_cancel_in_the_mean(lab):
    """One of four moves by an ulp: a quarter of it, which bf16 cannot hold beside 1."""
    ulp = torch.finfo(torch.bfloat16).eps

    def replica(exchange):
        model, inner, outer = one_weight(exchange, torch.bfloat16, 1.0)
        with outer:
            move(model, inner, ulp if exchange.rank == 2 else 0.0)
            return global_copy(outer)

    for copy in lab.run(replica, in_process(4)):
        assert torch.equal(copy, torch.full((4,), 1 + ulp / 4))


def test_rounding_is_no_progress(lab):
    """Replicas that stand still leave the global copy alone, even if the model cannot hold it."""

    def replica(exchange):
        model, inner, outer = one_weight(exchange, torch.bfloat16, 0.3)
        with outer:
            move(model, inner, -0.0078125)
            moved = global_copy(outer)
            for _ in range(5):
                move(model, inner, 0.0)
            return moved, global_copy(outer)

    for moved, later in lab.run(replica, in_process(2)):
        assert not torch.equal(moved, moved.bfloat16().float())
        assert torch.equal(moved, later)


@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.float16, torch.float32), (torch.float64, torch.float64)]
)
def test_outer_state_is_kept_in_the_global_copys_dtype(lab, dtype, kept):
    model = lab.fill(nn.Linear(20, 3).to(dtype))
    adam = lambda given: torch.optim.Adam(given, lr=0.1)  # noqa: E731
    model, inner, outer, _ = loop(None, model, sync_every=1, outer_optimizer=adam)
    with outer:
        lab.push(model, inner, 0, 0)
        (fragment,) = outer.state_dict()["fragments"]
    held = [each for entry in fragment["outer"]["ranges"] for each in entry["tensors"].values()]
    assert len(held) >= 2, "two moments"
    assert {each.dtype for each in [*fragment["copy"], *held]} == {kept}


def test_mixed_dtypes_each_in_its_own_precision(lab):
    """One model with three dtypes makes the same numbers as three models with one each."""

    def replica(exchange, number=None):
        parts = [nn.Linear(3, 9, dtype=torch.float64), nn.Linear(3, 9), nn.Linear(3, 9).bfloat16()]
        model = nn.ModuleList([lab.fill(part, seed) for seed, part in enumerate(parts)])
        for other, part in enumerate(model):
            part.requires_grad_(number in (None, other))
        _, inner, outer, _ = loop(exchange, model)
        with outer:
            for step in range(5):
                for seed, parameter in enumerate(model.parameters()):
                    generator = torch.Generator().manual_seed(seed + 10 * step + exchange.rank)
                    gradient = torch.randn(parameter.shape, generator=generator) / 8
                    if parameter.requires_grad:
                        parameter.grad = gradient.to(parameter.dtype)
                inner.step()
            copies = outer.state_dict()["fragments"][0]["copy"]
        return lab.values(model), [(copy.dtype, copy.numel()) for copy in copies]

    together = lab.run(replica, in_process(3))
    assert [copies for _, copies in together] == [[(torch.float64, 36), (torch.float32, 72)]] * 3
    assert lab.identical([held for held, _ in together])
    for number, near in enumerate((1e-12, 1e-6, 1e-2)):
        (alone, _), *_ = lab.run(lambda each, n=number: replica(each, n), in_process(3))
        for name, value in together[0][0].items():
            if name.startswith(f"{number}."):
                assert torch.allclose(alone[name], value, rtol=near, atol=near)
