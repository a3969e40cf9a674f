"""Learning rate schedules in ``stateful``: a resumed run has the rates of an unstopped one."""

import pytest
import torch
from torch.optim import lr_scheduler

from diloco_core import DiLoCo, Elastic, StoreExchange
from diloco_core._store._open import open_store

SCHEDULES = {
    "cosine": lambda inner: lr_scheduler.CosineAnnealingLR(inner, T_max=40),
    "lambda": lambda inner: lr_scheduler.LambdaLR(inner, lambda step: 0.97**step),
    "in sequence": lambda inner: lr_scheduler.SequentialLR(
        inner,
        [lr_scheduler.LinearLR(inner, 0.1, total_iters=4), lr_scheduler.StepLR(inner, 3)],
        milestones=[5],
    ),
}


def opened(kind, uri, resume):
    store = open_store(uri)
    if kind == "fixed":
        return StoreExchange(store, 0, 1, resume=resume)
    return StoreExchange(store, 0, 1, Elastic(1))


def incarnation(lab, exchange, make, steps, *, killed=False, every=10, after=False):
    """Train up to a number of inner steps. The learning rate of every step, and the model."""
    net = lab.fill(torch.nn.Linear(3, 2))
    inner = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    schedule = make(inner)
    stateful = {"schedule": schedule}
    rates = []
    try:
        with DiLoCo(
            net, inner, exchange, sync_every=2, stateful=stateful, save_inner_every=every
        ) as outer:
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


@pytest.mark.parametrize("kind", ["fixed", "elastic"])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.filterwarnings(
    "ignore:Detected call of:UserWarning"
)  # torch does not know of earlier incarnations
def test_it_is_stepped_up_to_the_inner_step(lab, kind, name, killed):
    """Saved after every second sync, so that an incarnation begins with a schedule that is behind
    the run by as much as a sync.
    """
    make, place = SCHEDULES[name], f"memory://schedules/{kind}/{name}/{killed}".replace(" ", "-")
    wanted = incarnation(lab, opened(kind, f"{place}/whole", False), make, 14)
    rates = []
    for number, steps in enumerate((6, 10, 14)):
        exchange = opened(kind, f"{place}/stopped", bool(number))
        rates += incarnation(lab, exchange, make, steps, killed=killed and steps < 14, every=2)
    assert rates == wanted
    assert len({rate for _, rate in rates}) > 3


def test_a_step_after_the_last_sync_is_saved_when_the_block_is_left(lab):
    make, place = SCHEDULES["cosine"], "memory://schedules/after"
    wanted = incarnation(
        lab, opened("fixed", f"{place}/whole", False), make, 12, every=1, after=True
    )
    first = incarnation(lab, opened("fixed", f"{place}/left", False), make, 6, every=1, after=True)
    rest = incarnation(lab, opened("fixed", f"{place}/left", True), make, 12, every=1, after=True)
    assert first + rest == wanted
