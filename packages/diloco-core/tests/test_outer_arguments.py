"""Arguments that are not allowed are refused before anything starts, with what was given and what is allowed."""

import pytest
import torch
from torch import nn

from diloco_core import ConfigurationError, DiLoCo, MismatchError, in_process
from diloco_core.testing import run_replicas


class Untouched:
    """An exchange that nobody may use yet."""

    rank, world_size = 0, 2

    def __getattr__(self, name):
        raise AssertionError(f"{name} was used before the arguments were checked")


def make(model=None, **options):
    model = model or nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    return DiLoCo(model, inner, Untouched(), **{"sync_every": 6, **options})


@pytest.mark.parametrize("sync_every", [0, -3, 5, 2.0, 7, "6", None])
def test_sync_every_is_a_positive_multiple_of_the_fragments(sync_every):
    with pytest.raises(
        ConfigurationError,
        match=rf"sync_every is {sync_every}, but must be a positive multiple of the number of fragments, which is 3",
    ):
        make(sync_every=sync_every, fragments=3)


@pytest.mark.parametrize("lr", [0.0, -0.1, float("nan")])
def test_the_outer_lr_is_positive(lr):
    with pytest.raises(ConfigurationError, match=f"outer learning rate must be positive, not {lr}"):
        make(outer_lr=lr)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_the_outer_momentum_is_in_range(momentum):
    with pytest.raises(ConfigurationError, match=rf"must be in \[0, 1\), not {momentum}"):
        make(outer_momentum=momentum)


@pytest.mark.parametrize("model", [nn.Linear(2, 2).requires_grad_(False), nn.ReLU()])
def test_a_model_without_trainable_parameters_is_refused(model):
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        make(model)


def test_fragments_by_number():
    for fragments in (0, -1):
        with pytest.raises(ConfigurationError, match=f"fragments must be at least 1, not {fragments}"):
            make(fragments=fragments)
    with pytest.raises(ConfigurationError, match="4 trainable tensors, too few for 6 fragments"):
        make(fragments=6)


def test_fragments_by_module():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match=r"in no fragment: '1.weight', '1.bias'"):
        make(model, fragments=[model[0]])
    with pytest.raises(ConfigurationError, match=r"fragment 1 \(Linear\) is not a module of the model"):
        make(model, fragments=[model[0], nn.Linear(2, 2)])
    with pytest.raises(ConfigurationError, match=r"fragment 0 \(str\) is not a module of the model"):
        make(model, fragments=["0"])
    with pytest.raises(ConfigurationError, match=r"fragment 1 \(Linear\) adds no trainable parameter"):
        make(model, fragments=[model, model[0]])
    with pytest.raises(ConfigurationError, match="at least one module"):
        make(model, fragments=[])


def test_tensors_that_cannot_be_synced():
    with pytest.raises(ConfigurationError, match=r"'weight' has dtype torch.complex64; bfloat16, .* can be synced"):
        make(nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(ConfigurationError, match="'weight' is on the meta device"):
        make(nn.Linear(2, 2, device="meta"))
    sparse = nn.Module()
    sparse.weight = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(ConfigurationError, match=r"'weight' is a .* with layout torch.sparse_coo"):
        make(sparse)


@pytest.mark.parametrize("option", ["init", "buffers"])
def test_options_with_a_few_values(option):
    with pytest.raises(ConfigurationError, match=f"{option} must be .*not 'random'"):
        make(**{option: "random"})


def test_it_is_a_value_error_too():
    """For callers that know nothing of our errors."""
    with pytest.raises(ValueError, match="sync_every"):
        make(sync_every=0)


def test_differing_initial_values_are_refused_on_demand(lab):
    """init="check": the replicas were to start from the same values, and do not."""

    def replica(exchange):
        model = lab.fill(nn.Linear(2, 2))
        if exchange.rank == 1:
            model.bias.data[1] += 1e-7
        with DiLoCo(model, torch.optim.SGD(model.parameters()), exchange, sync_every=1, init="check"):
            pass

    results = run_replicas(replica, in_process(2))
    assert all(isinstance(result, MismatchError) for result in results)
    assert "differ in tensor 'bias'" in str(results[0])
    assert lab.train(lambda rank: lab.fill(nn.Linear(2, 2)), in_process(2), init="check")
