"""An optimizer that the outer loop was not told of is noticed, and nothing else is."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from diloco_core import (
    DiLoCo,
    Elastic,
    ReplicaLostError,
    StoreExchange,
    UnseenStepsError,
    in_process,
)
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "for each": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
}


def backward(model, number=0):
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
    model(inputs).pow(2).mean().backward()


@contextmanager
def refused(match=None):
    with pytest.raises(UnseenStepsError, match=match) as caught:
        yield caught


def elastic(tmp_path):
    return StoreExchange(open_store(str(tmp_path / "run")), 0, 1, Elastic(1, grace=1.0))


class TestAnotherOptimizer:
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    @pytest.mark.parametrize("before", [0, 7])
    @pytest.mark.parametrize("sync_every", [1, 5, 20])
    def test_is_an_error_after_a_while(self, lab, tmp_path, kind, before, sync_every):
        model = lab.small_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        passes = 0
        with (
            refused(match=r"parameter '.*' is trained, but no inner optimizer") as caught,
            DiLoCo(model, inner, elastic(tmp_path), sync_every=sync_every) as outer,
        ):
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

    def test_so_is_a_step_that_was_replaced(self, lab):
        model = lab.small_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)

        def step():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.data -= 0.01 * parameter.grad

        with refused(), DiLoCo(model, inner, in_process(1)[0], sync_every=2):
            inner.step = step
            for number in range(1000):
                backward(model, number)
                inner.step()
                inner.zero_grad()

    def test_a_compiled_model_is_watched_too(self, lab):
        model = lab.small_model()
        compiled = torch.compile(model, backend="eager")
        inner, other = (torch.optim.SGD(model.parameters(), lr=0.01) for _ in range(2))
        with refused(), DiLoCo(compiled, inner, in_process(1)[0], sync_every=2):
            for number in range(1000):
                backward(compiled, number)
                other.step()

    def test_parameters_that_the_loss_does_not_reach_do_not_hide_it(self, lab):
        model = nn.ModuleDict(
            {"unused": nn.Linear(1, 1), "used": nn.Linear(3, 2), "last": nn.Linear(3, 2)}
        )
        inner, other = (torch.optim.SGD(model.parameters(), lr=0.01) for _ in range(2))
        with refused(match="'last"), DiLoCo(model, inner, in_process(1)[0], sync_every=2):
            model["used"].requires_grad_(False)
            for number in range(1000):
                backward(model["last"], number)
                other.step()

    def test_one_that_few_steps_were_taken_with_is_found_at_the_end(self, lab):
        model = lab.small_model()
        inner, other = (torch.optim.SGD(model.parameters(), lr=0.01) for _ in range(2))
        with refused(), DiLoCo(model, inner, in_process(1)[0], sync_every=5):
            for number in range(20):
                backward(model, number)
                (inner if number < 7 else other).step()

    @pytest.mark.parametrize("steps", [1, 4])
    def test_in_a_strict_run_it_is_an_error_at_the_end_however_few_steps_there_were(
        self, lab, steps
    ):
        model = lab.small_model()
        before = lab.values(model)
        inner, other = (torch.optim.SGD(model.parameters(), lr=0.01) for _ in range(2))
        with (
            refused(match="the inner optimizer did not take a single step") as caught,
            DiLoCo(model, inner, in_process(1)[0], sync_every=5),
        ):
            for number in range(steps):
                backward(model, number)
                other.step()
        assert "rank 0" in str(caught.value)
        assert lab.identical([lab.values(model), before])

    def test_the_others_hear_who_it_was(self, lab):
        def train(exchange):
            model = lab.small_model()
            inner, other = (torch.optim.SGD(model.parameters(), lr=0.01) for _ in range(2))
            with DiLoCo(model, inner, exchange, sync_every=5):
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
    with DiLoCo(model, inner, in_process(1)[0], sync_every=3) as outer:
        train(model, inner)
        assert outer.inner_steps > 0


def test_nothing_stays_at_the_model_when_the_block_is_left(lab):
    model = lab.small_model()
    outer, inner = lab.outer_loop(model, in_process(1)[0])
    with outer:
        lab.small_step(model, inner)
        assert any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_step_with_many_backward_passes_is_one_step(lab, tmp_path):
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

    with DiLoCo(model, inner, elastic(tmp_path), sync_every=2) as outer:
        for _ in range(2):
            inner.step(closure)
    assert len(passes) > 60
    assert outer.committed == 1


def test_an_elastic_run_without_a_step_that_was_seen_is_refused_too(lab, tmp_path):
    """By gradients that no backward pass brings, there is nothing to be seen before the end."""
    model = lab.small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        refused(match="the inner optimizer did not take a single step"),
        DiLoCo(model, inner, elastic(tmp_path), sync_every=2),
    ):
        other = torch.optim.SGD(model.parameters(), lr=0.01)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        other.step()


def test_steps_before_the_block_do_not_hide_another_optimizer_inside_of_it(lab, tmp_path):
    model = lab.small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    outer = DiLoCo(model, inner, elastic(tmp_path), sync_every=5)
    backward(model)
    inner.step()

    def train():
        with outer:
            other = torch.optim.SGD(model.parameters(), lr=0.01)
            for number in range(31):
                backward(model, number)
                other.step()
                other.zero_grad()
            raise AssertionError("not noticed")

    with refused(match=r"parameter '.*' is trained, but no inner optimizer"):
        train()
