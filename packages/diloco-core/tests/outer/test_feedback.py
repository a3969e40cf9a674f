"""Error feedback in every exchange: what a codec loses is added to the next contribution."""

import logging

import pytest
import torch
from codecs_lab import decoded as as_sent
from loop_lab import KINDS, exchanges, loop
from resuming_lab import REPLICAS, Experiment, equal
from training_lab import fill, identical, push, run, values

from diloco_core import ConfigurationError, NonFiniteDeltaError, connect, in_process

pytestmark = pytest.mark.sampled

CODEC = "e2m1"
FED = {"codec": CODEC, "error_feedback": True}
PERIOD, SYNCS = 3, 4


def make(rank=0):
    return fill(torch.nn.Linear(16, 10))


def flat(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def live(exchange, until, after=lambda outer: None, **options):
    """Train up to a number of inner steps, and call a function with the loop at the end."""
    model, inner, outer, _ = loop(exchange, make(), **options)
    with outer:
        while outer.inner_steps < until:
            push(model, inner, exchange.rank, outer.inner_steps)
        after(outer)
    return values(model)


def wanted(delay, alpha, decay):
    """The parameters after some syncs without outer momentum, by the formulas."""
    models = [make() for _ in range(2)]
    inners = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    copy, residuals = flat(models[0]), [torch.zeros(170) for _ in range(2)]
    for sync in range(SYNCS):
        decoded = []
        for rank in range(2):
            for step in range(PERIOD * sync, PERIOD * (sync + 1)):
                if step == PERIOD * (sync + 1) - delay:
                    offered = copy - flat(models[rank]) + decay * residuals[rank]
                push(models[rank], inners[rank], rank, step)
            if not delay:
                offered = copy - flat(models[rank]) + decay * residuals[rank]
            # Shards are cut at multiples of 32 elements, so that blocks are the same in all of
            # them.
            decoded.append(as_sent(CODEC, offered))
            residuals[rank] = offered - decoded[rank]
        copy = copy - 0.5 * (decoded[0] + decoded[1]) / 2
        for model in models:
            mixed = torch.lerp(copy, flat(model), alpha)
            torch.nn.utils.vector_to_parameters(mixed, model.parameters())
    return copy


@pytest.mark.parametrize(("delay", "alpha"), [(0, 0.0), (1, 0.0), (1, 0.5), (0, 0.5)])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_as_in_the_formulas(kind, delay, alpha):
    options = {"outer_lr": 0.5, "outer_momentum": 0.0, "delay": delay, "alpha": alpha}
    options |= {"codec": CODEC, "error_feedback": 0.75, "sync_every": PERIOD}
    ends = run(lambda each: live(each, PERIOD * SYNCS, **options), exchanges(kind, 2))
    assert identical(ends)
    found = torch.cat([value.reshape(-1) for value in ends[0].values()])
    assert torch.allclose(found, wanted(delay, alpha, 0.75), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("stop", "delay"), [(1, 0), (4, 0), (4, 1)])
def test_a_loaded_state_goes_on_with_its_residual(lab, stop, delay):
    experiment = Experiment(lab, **FED, delay=delay)
    whole = lab.run(experiment.whole, in_process(REPLICAS))
    saved = lab.run(experiment.until(stop), in_process(REPLICAS))
    assert all(map(equal, lab.run(experiment.since(saved, stop), in_process(REPLICAS)), whole))


def state_of(**options):
    """The state after two syncs, and the model that it belongs to."""
    model, inner, outer, _ = loop(None, make(), codec=CODEC, **options)
    with outer:
        for step in range(4):
            push(model, inner, 0, step)
        return outer.state_dict(), model


def test_a_state_with_another_residual_is_refused():
    state, model = state_of(error_feedback=True)
    loop(None, model, **FED)[2].load_state_dict(state)
    part = state["fragments"][0]
    for wrong in ([part["residual"][0] + 1.0], [torch.zeros(3)], None):
        changed = {**state, "fragments": [{**part, "residual": wrong}]}
        with pytest.raises(ConfigurationError, match="have changed since state_dict"):
            loop(None, model, **FED)[2].load_state_dict(changed)


class StopError(Exception):
    pass


def stop(outer):
    raise StopError


@pytest.mark.parametrize("kind", ["store", "sharded"])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("save_every", [0, 4])
def test_a_residual_that_was_not_saved_is_lost_and_said(kind, save_every, delay, tmp_path, caplog):
    options = {"delay": delay, **FED, "save_inner_every": save_every}
    with pytest.raises(BaseExceptionGroup):
        run(lambda each: live(each, 8, stop, **options), exchanges(kind, 2, tmp_path))
    caplog.clear()
    run(lambda each: live(each, 10, **options), exchanges(kind, 2, tmp_path, resume=True))
    for rank in (0, 1):
        text = f"rank {rank}: error feedback of fragment 0 starts again from zero after sync"
        (record,) = [record for record in caplog.records if text in record.getMessage()]
        assert record.levelno == logging.WARNING
        assert "save_inner_every=1 avoids this" in record.getMessage()


def test_what_is_not_finite_with_the_residual_is_refused_before_it_is_sent(tmp_path):
    exchange = connect(tmp_path / "run", rank=0, world_size=1)
    options = {"codec": "fp16", "error_feedback": True, "outer_lr": 1e-30, "sync_every": 1}
    model, inner, outer, _ = loop(exchange, torch.nn.Linear(4, 1, bias=False), **options)

    def act():
        with outer:
            for _ in range(4):  # fp16 sends 65504 of it, and the rest remains
                model.weight.grad = torch.full((1, 4), 0.75 * torch.finfo(torch.float32).max)
                inner.step()

    with pytest.raises(NonFiniteDeltaError, match="'weight' holds NaN or infinity"):
        act()
