"""Global copy, sums and outer state are kept in at least fp32, so that no outer step is lost."""

import pytest
import torch
from loop_lab import exchanges, loop
from torch import nn

from diloco_core import DiLoCo, in_process


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
    """Three of four replicas stay, one moves by an ulp: the mean is a quarter of it, which bf16
    cannot hold beside 1.
    """
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
    ("dtype", "kept"),
    [
        *((dtype, torch.float32) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
        (torch.float64, torch.float64),
    ],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_outer_state_is_kept_in_the_global_copys_dtype(lab, dtype, kept, optimizer):
    def replica(exchange):
        model = lab.fill(nn.Linear(20, 3).to(dtype))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        outer_optimizer = None if optimizer == "sgd" else lambda p: torch.optim.Adam(p, lr=0.1)
        with DiLoCo(model, inner, exchange, sync_every=1, outer_optimizer=outer_optimizer) as outer:
            lab.push(model, inner, exchange.rank, 0)
        return outer.state_dict()["fragments"][0]

    names = {"sgd": {"momentum_buffer"}, "adam": {"exp_avg", "exp_avg_sq"}}[optimizer]
    for fragment in lab.run(replica, in_process(2)):
        assert [copy.dtype for copy in fragment["copy"]] == [kept]
        assert all(entry["tensors"].keys() == names for entry in fragment["outer"]["ranges"])
        assert {
            t.dtype for entry in fragment["outer"]["ranges"] for t in entry["tensors"].values()
        } == {kept}


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
