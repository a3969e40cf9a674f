"""An inner optimizer that writes weights of its own back over what a sync has brought is noticed;
and no other one is.
"""

from contextlib import nullcontext

import pytest
import torch
from optimizers_lab import SOUND, MasterSGD, model_of, together, train

from diloco_core import DiLoCo, ModelChangedError, in_process
from diloco_core._inner import _kept_weights
from diloco_core._inner._kept_weights import KeptWeights
from diloco_core.testing import run_replicas


def refused(results, state, name):
    """Both have found out by themselves, or one has heard of the other."""
    errors = [result for result in results if isinstance(result, ModelChangedError)]
    assert errors, results
    for error in errors:
        assert error.tensor == name
        assert "has undone the last sync: it keeps a copy of the weights" in str(error)
        assert f"({state!r} in its state of parameter {name!r})" in str(error)
        assert "Use an optimizer that changes the model's own weights." in str(error)


def test_master_weights_are_noticed_at_the_step_after_the_first_sync():
    results = together(lambda p: MasterSGD(p, lr=0.05), dtype=torch.bfloat16, steps=21)
    refused(results, "master", "0.weight")
    assert "inner optimizer 0 (MasterSGD)" in str(results[0])


def test_before_that_step_nothing_is_wrong():
    results = together(
        lambda p: MasterSGD(p, lr=0.05), dtype=torch.bfloat16, steps=20, flush="none"
    )
    assert [outer.committed for outer in results] == [1, 1]


def test_of_several_optimizers_it_is_the_right_one():
    def two(parameters):
        return [
            torch.optim.AdamW(parameters[:2], lr=0.01),
            MasterSGD(parameters[2:], lr=0.05),
        ]

    def both(exchange):
        model = model_of(torch.bfloat16)
        inner = two(list(model.parameters()))
        generator = torch.Generator().manual_seed(exchange.rank)
        with DiLoCo(model, inner, exchange, sync_every=20):
            for _ in range(41):
                inputs = torch.randn(16, 6, generator=generator)
                wanted = inputs.sum(1, keepdim=True) * (1 + exchange.rank)
                (model(inputs.bfloat16()) - wanted.bfloat16()).pow(2).mean().backward()
                for optimizer in inner:
                    optimizer.step()
                    optimizer.zero_grad()

    results = run_replicas(both, in_process(2))
    refused(results, "master", "2.weight")
    assert any("inner optimizer 1 (MasterSGD)" in str(result) for result in results)


@pytest.mark.parametrize("written_back", [True, False])
def test_it_is_the_copy_that_counts_and_not_only_where_the_parameter_is(written_back):
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 100).bfloat16())
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    master = optimizer.state[parameter]["master"] = torch.linspace(-1, 1, 100)
    trained = parameter.detach().clone()
    kept = KeptWeights([optimizer], {id(parameter): "weight"})
    kept.before_sync()
    with torch.no_grad():
        parameter.zero_()
        kept.after_sync()
        parameter.copy_(trained)
        if not written_back:
            master.zero_()
    with pytest.raises(ModelChangedError) if written_back else nullcontext():
        kept.check(0)


@pytest.mark.parametrize("make", SOUND.values(), ids=SOUND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_others_are_not_accused(make, dtype):
    for outer in together(make, dtype=dtype):
        assert outer.committed == 3


@pytest.mark.parametrize("make", [SOUND["AdamW"], SOUND["ASGD"]], ids=["AdamW", "ASGD"])
@pytest.mark.parametrize("fragments", [1, 2])
def test_others_are_not_accused_where_every_step_is_synced(make, fragments):
    for outer in together(make, sync_every=fragments, fragments=fragments, steps=12):
        assert outer.committed >= 12


def test_a_replica_alone_that_changes_nothing_is_not_accused():
    """Its outer step puts every value where the inner steps have brought it."""
    (exchange,) = in_process(1)
    outer = train(
        exchange,
        lambda p: MasterSGD(p, lr=0.05),
        dtype=torch.bfloat16,
        outer_lr=1.0,
        outer_momentum=0.0,
    )
    assert outer.committed == 3


def test_no_values_are_read_where_nothing_wider_is_kept(monkeypatch):
    """On an accelerator, reading them would wait for all that it has still to do."""
    read = []

    def counted(tensor, dtype=None):
        read.append(tensor)
        return values(tensor, dtype)

    values = _kept_weights._values
    monkeypatch.setattr(_kept_weights, "_values", counted)
    (exchange,) = in_process(1)
    train(exchange, torch.optim.AdamW, dtype=torch.float32)
    assert not read
    (exchange,) = in_process(1)
    train(
        exchange,
        lambda p: MasterSGD(p, lr=0.05),
        dtype=torch.bfloat16,
        outer_lr=1.0,
        outer_momentum=0.0,
    )
    assert read
