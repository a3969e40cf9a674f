"""Learning rate schedules in ``stateful``: a resumed run has the rates of an unstopped one."""

import pytest
import torch
from loop_lab import exchanges, loop
from torch.optim import lr_scheduler

SCHEDULES = {
    "cosine": lambda inner: lr_scheduler.CosineAnnealingLR(inner, T_max=40),
    "lambda": lambda inner: lr_scheduler.LambdaLR(inner, lambda step: 0.97**step),
    "in sequence": lambda inner: lr_scheduler.SequentialLR(
        inner,
        [lr_scheduler.LinearLR(inner, 0.1, total_iters=4), lr_scheduler.StepLR(inner, 3)],
        milestones=[5],
    ),
}


def incarnation(lab, exchange, make, steps, *, killed=False, every=10, after=False):
    """Train up to a number of inner steps. The learning rate of every step, and the model."""
    net = lab.fill(torch.nn.Linear(3, 2))
    inner = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    schedule = make(inner)
    options = {"stateful": {"schedule": schedule}, "save_inner_every": every}
    outer, rates = loop(exchange, net, inner, **options)[2], []
    try:
        with outer:
            while outer.inner_steps < steps:
                while not after and schedule.last_epoch < outer.inner_steps:
                    schedule.step()
                rates.append((outer.inner_steps, inner.param_groups[0]["lr"]))
                lab.push(net, inner, 0, outer.inner_steps)
                if after:
                    schedule.step()
            if killed:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    return rates


@pytest.mark.parametrize("kind", ["store", "elastic"])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.filterwarnings(
    "ignore:Detected call of:UserWarning"
)  # torch does not know of earlier incarnations
def test_it_is_stepped_up_to_the_inner_step(lab, tmp_path, kind, name, killed):
    """Saved after every second sync, so that an incarnation begins with a schedule that is behind
    the run by as much as a sync.
    """
    make = SCHEDULES[name]
    wanted = incarnation(lab, *exchanges(kind, 1), make, 14)
    rates = []
    for number, steps in enumerate((6, 10, 14)):
        (exchange,) = exchanges(kind, 1, tmp_path, resume=bool(number) and kind == "store")
        rates += incarnation(lab, exchange, make, steps, killed=killed and steps < 14, every=2)
    assert rates == wanted
    assert len({rate for _, rate in rates}) > 3


def test_a_step_after_the_last_sync_is_saved_when_the_block_is_left(lab, tmp_path):
    make, options = SCHEDULES["cosine"], {"every": 1, "after": True}
    wanted = incarnation(lab, *exchanges("store", 1), make, 12, **options)
    first = incarnation(lab, *exchanges("store", 1, tmp_path), make, 6, **options)
    rest = incarnation(lab, *exchanges("store", 1, tmp_path, resume=True), make, 12, **options)
    assert first + rest == wanted
