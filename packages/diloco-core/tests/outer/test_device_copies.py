"""Delayed syncs of a model on an accelerator, or what looks like one."""

import threading

import device_lab
import pytest
import torch
from device_lab import PretendedAccelerator
from loop_lab import at_once, live, loop
from torch import nn
from training_lab import PATIENCE

from diloco_core import Timing, in_process

OPTIONS = [
    {"sync_every": 4, "delay": 2},
    {"sync_every": 4, "delay": 3, "alpha": 0.5},
    {"sync_every": 6, "fragments": 2, "delay": 2, "alpha": 0.5},
    {"sync_every": 4, "alpha": 0.5},
    {"sync_every": 4, "delay": 1, "alpha": 0.5, "codec": "bf16", "error_feedback": True},
    {"sync_every": 4, "delay": 2, "clip": "median"},
]


def train(exchange, device, options):
    """All values after every step.

    They are multiples of powers of two, so that no device rounds them.
    """
    generator = torch.Generator().manual_seed(exchange.rank)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number)
    model.to(device)
    inner = torch.optim.SGD(model.parameters(), lr=0.25)
    options = {"outer_lr": 0.5, "outer_momentum": 0.0, **options}
    seen = []
    with loop(exchange, model, inner, **options)[2]:
        for step in range(13):
            for parameter in model.parameters():
                whole = torch.randint(-4, 5, parameter.shape, generator=generator)
                parameter.grad = whole.float().to(device)
            model[2].running_mean.add_(exchange.rank + step)
            inner.step()
            seen.append({name: each.cpu().clone() for name, each in model.state_dict().items()})
    return [*seen, {name: each.cpu() for name, each in model.state_dict().items()}]


def runs(lab, options, device="cpu"):
    return lab.run(lambda exchange: train(exchange, device, options), in_process(2))


def same(lab, ours, theirs):
    return all(
        lab.identical([a, b])
        for run, other in zip(ours, theirs, strict=True)
        for a, b in zip(run, other, strict=True)
    )


@pytest.mark.sampled
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_on_a_pretended_device_the_values_are_those_on_the_cpu(lab, monkeypatch, options, late):
    theirs = runs(lab, options)
    accelerator = device_lab.use(monkeypatch, PretendedAccelerator(late=late))
    assert same(lab, runs(lab, options), theirs)
    assert accelerator.asked.count("pinned memory") == 2 * options.get("fragments", 1)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch finds no accelerator here")
@pytest.mark.parametrize("options", OPTIONS)
def test_on_an_accelerator_the_values_are_those_on_the_cpu(lab, options):
    device = torch.accelerator.current_accelerator()
    assert same(lab, runs(lab, options, device), runs(lab, options))


def test_the_thread_that_trains_waits_for_no_copy(lab, monkeypatch):
    class Watched(PretendedAccelerator):
        def wait(self, event):
            waiting.append(threading.current_thread())
            super().wait(event)

    waiting = []
    device_lab.use(monkeypatch, Watched())
    model, inner, outer, _ = loop(sync_every=4, delay=2, alpha=0.5)
    with outer:
        for step in range(8):
            lab.push(model, inner, 0, step)
        assert outer.committed == 2
        # Before it computes what is sent, and before it packs the result.
        assert len(waiting) == 2 * 2
        assert threading.current_thread() not in waiting


def test_a_failure_while_copying_is_raised_by_the_next_step(monkeypatch):
    class Broken(PretendedAccelerator):
        def wait(self, event):
            raise RuntimeError("the device is lost")

    device_lab.use(monkeypatch, Broken())
    (exchange,) = in_process(1, timing=Timing(in_background=at_once))
    model, inner, outer, _ = loop(exchange, sync_every=4, delay=3)
    with pytest.raises(RuntimeError, match="the device is lost"):
        live(model, inner, outer, *range(4))
    assert outer.inner_steps == 2, "the first step has sent it, and the next one raises"


class Slow(PretendedAccelerator):
    """A device that delivers nothing before it is told to."""

    def __init__(self):
        super().__init__()
        self.waited_for, self.go_on = threading.Event(), threading.Event()

    def wait(self, event):
        self.waited_for.set()
        assert self.go_on.wait(PATIENCE)
        super().wait(event)


@pytest.mark.parametrize("fails", [False, True])
def test_leaving_while_values_are_copied(lab, monkeypatch, fails):
    """At its end the sync is adopted; after an error, what the device delivers changes nothing."""
    device, threads = device_lab.use(monkeypatch, Slow()), []

    def in_thread(act):
        threads.append(threading.Thread(target=act, daemon=True))
        threads[-1].start()

        def join(seconds):
            if seconds is None:  # the end of the block waits for the result
                device.go_on.set()
                threads[-1].join()
            return not threads[-1].is_alive()

        return join

    (exchange,) = in_process(1, timing=Timing(in_background=in_thread))
    model, inner, outer, _ = loop(exchange, sync_every=4, delay=3)

    def train():
        with outer:
            lab.push(model, inner, 0, 0)
            assert device.waited_for.wait(PATIENCE)
            if fails:
                raise ValueError("a mistake")

    if not fails:
        train()
        assert outer.committed == 1
        return
    with pytest.raises(ValueError, match="a mistake"):
        train()
    held = lab.values(model)
    device.go_on.set()
    threads[-1].join(PATIENCE)
    assert lab.identical([held, lab.values(model)])
    assert outer.committed == 0
