"""An optimizer that the outer loop was not told of is noticed, and nothing else is."""

import pytest
import torch
from loop_lab import exchanges, loop
from torch import nn

from diloco_core import ReplicaLostError, UnseenStepsError, in_process
from diloco_core.testing import run_replicas

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "for each": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
}


def backward(model, number=0):
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
    model(inputs).pow(2).mean().backward()


def refused(match=None):
    return pytest.raises(UnseenStepsError, match=match)


def parts(lab, exchange=None, model=None, **options):
    """A model, its inner optimizer, another one, and the outer loop."""
    model = lab.small_model() if model is None else model
    inner, other = (torch.optim.SGD(model.parameters(), lr=0.01) for _ in range(2))
    return model, inner, other, loop(exchange, model, inner, **options)[2]


def elastic():
    return exchanges("elastic", 1, grace=1.0)[0]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("before", "sync_every"), [(0, 1), (7, 20)])
def test_another_optimizer_is_an_error_after_a_while(lab, kind, before, sync_every):
    model, inner, _, outer = parts(lab, elastic(), sync_every=sync_every)
    passes = 0
    with refused(r"parameter '.*' is trained, but no inner optimizer") as caught, outer:
        for number in range(before):
            backward(model, number)
            inner.step()
            inner.zero_grad()
        other = OPTIMIZERS[kind](model.parameters())
        while outer.committed < 100 and passes < 1000:
            passes += 1
            backward(model, passes)
            other.step()
            other.zero_grad()
    assert caught.value.tensor in dict(model.named_parameters())
    assert passes <= 3 * max(sync_every, 10) + 1


def test_so_is_a_step_that_was_replaced(lab):
    model, inner, other, outer = parts(lab)
    with refused(), outer:
        inner.step = other.step
        for number in range(1000):
            backward(model, number)
            inner.step()


def test_parameters_that_the_loss_does_not_reach_do_not_hide_it(lab):
    sizes = {"unused": (1, 1), "used": (3, 2), "last": (3, 2)}
    model = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})
    _, _, other, outer = parts(lab, None, model)
    with refused("'last"), outer:
        model["used"].requires_grad_(False)
        for number in range(1000):
            backward(model["last"], number)
            other.step()


def test_one_that_few_steps_were_taken_with_is_found_at_the_end(lab):
    model, inner, other, outer = parts(lab, sync_every=5)
    with refused(), outer:
        for number in range(20):
            backward(model, number)
            (inner if number < 7 else other).step()


@pytest.mark.parametrize("steps", [1, 4])
def test_a_block_without_a_step_that_was_seen_is_refused_however_few_there_were(lab, steps):
    """Also by gradients that no backward pass brings, where nothing is to be seen before."""
    for exchange in (None, elastic()):
        model, _, other, outer = parts(lab, exchange, sync_every=5)
        before = lab.values(model)
        with refused("the inner optimizer did not take a single step") as caught, outer:
            for number in range(steps):
                if exchange is None:
                    backward(model, number)
                else:
                    for parameter in model.parameters():
                        parameter.grad = torch.ones_like(parameter)
                other.step()
        assert "rank 0" in str(caught.value)
        assert lab.identical([lab.values(model), before])


def test_the_others_hear_who_it_was(lab):
    def train(exchange):
        model, inner, other, outer = parts(lab, exchange, sync_every=5)
        with outer:
            for number in range(10):
                backward(model, number)
                (other if exchange.rank == 1 else inner).step()

    innocent, guilty = run_replicas(train, in_process(2))
    assert isinstance(guilty, UnseenStepsError)
    assert isinstance(innocent, ReplicaLostError)
    assert innocent.rank == 1
    assert "UnseenStepsError" in str(innocent)


def accumulate(model, inner):
    for number in range(95):
        backward(model, number)
    inner.step()


def evaluate_with_other_values(model, inner):
    for number in range(60):
        backward(model, number)
        held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict({name: tensor + 1 for name, tensor in held.items()})
        model.load_state_dict(held)
    inner.step()


def change_once_between_two_looks(model, inner):
    for number in range(60):
        backward(model, number)
        if number == 15:
            for parameter in model.parameters():
                parameter.data.add_(1)
    inner.step()


def skip_batches(model, inner):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for _ in range(60):
        inner.zero_grad()
        scaler.scale(model(torch.full((2, 3), torch.inf)).sum()).backward()
        scaler.step(inner)
        scaler.update()
    inner.zero_grad()
    backward(model)
    inner.step()


def change_between_steps(model, inner):
    for number in range(60):
        backward(model, number)
        inner.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-1, 1)


def step_in_the_backward_pass(model, inner):
    first = next(model.parameters())
    handle = first.register_post_accumulate_grad_hook(lambda _: inner.step())
    for number in range(60):
        backward(model, number)
    handle.remove()


def hold_nan(model, inner):
    with torch.no_grad():
        held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    for number in range(60):
        backward(model, number)
    model.load_state_dict(held)
    for parameter in model.parameters():
        parameter.grad = None
    inner.step()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "train",
    [
        accumulate,
        evaluate_with_other_values,
        change_once_between_two_looks,
        skip_batches,
        change_between_steps,
        step_in_the_backward_pass,
        hold_nan,
    ],
    ids=lambda function: function.__name__,
)
def test_what_is_no_other_optimizer_is_let_alone(lab, train):
    model = lab.small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.001)
    with loop(None, model, inner, sync_every=3)[2] as outer:
        train(model, inner)
        assert outer.inner_steps > 0


def test_nothing_stays_at_the_model_when_the_block_is_left(lab):
    model = lab.small_model()
    outer, inner = lab.outer_loop(model, in_process(1)[0])
    with outer:
        lab.small_step(model, inner)
        assert any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_step_with_many_backward_passes_is_one_step(lab):
    """LBFGS tries many points within one step, and moves the parameters to each of them."""
    model = lab.small_model()
    inner = torch.optim.LBFGS(
        model.parameters(), lr=0.01, max_iter=60, max_eval=80, tolerance_grad=0, tolerance_change=0
    )
    passes = []

    def closure():
        inner.zero_grad()
        loss = model(torch.ones(5, 3)).pow(2).mean()
        loss.backward()
        passes.append(loss)
        return loss

    with loop(elastic(), model, inner)[2] as outer:
        for _ in range(2):
            inner.step(closure)
    assert len(passes) > 60
    assert outer.committed == 1


def test_steps_before_the_block_do_not_hide_another_optimizer_inside_of_it(lab):
    model, inner, other, outer = parts(lab, elastic(), sync_every=5)
    backward(model)
    inner.step()
    with refused(r"parameter '.*' is trained, but no inner optimizer"), outer:
        for number in range(31):
            backward(model, number)
            other.step()
            other.zero_grad()
        raise AssertionError("not noticed")
