"""Delayed syncs of a model on an accelerator, or what looks like one: the same values, and no error
is lost.
"""

import threading

import pytest
import torch
from device_lab import PretendedAccelerator
from torch import nn

from diloco_core import DiLoCo, Timing, in_process
from diloco_core._loop import _flight
from diloco_core._outer._delayed import DelayedFragment

OPTIONS = [
    {"sync_every": 4, "delay": 2},
    {"sync_every": 4, "delay": 3, "alpha": 0.5},
    {"sync_every": 6, "fragments": 2, "delay": 2, "alpha": 0.5},
    {"sync_every": 4, "alpha": 0.5},
    {"sync_every": 4, "delay": 1, "alpha": 0.5, "codec": "bf16", "error_feedback": True},
    {"sync_every": 4, "delay": 2, "clip": "median"},
]


@pytest.fixture
def pretended(monkeypatch):
    def use(accelerator):
        monkeypatch.setattr(DelayedFragment, "_accelerator", accelerator)
        return accelerator

    return use


def train(exchange, device, options):
    """All values after every step.

    They are multiples of powers of two, so that no device rounds them.
    """
    generator = torch.Generator().manual_seed(exchange.rank)
    whole = lambda tensor: torch.randint(-4, 5, tensor.shape, generator=generator).float()  # noqa: E731
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number)
    model.to(device)
    inner = torch.optim.SGD(model.parameters(), lr=0.25)
    outer = {"outer_lr": 0.5, "outer_momentum": 0.0, **options}
    seen = []
    with DiLoCo(model, inner, exchange, **outer):
        for step in range(13):
            for parameter in model.parameters():
                parameter.grad = whole(parameter).to(device)
            model[2].running_mean.add_(exchange.rank + step)
            inner.step()
            seen.append(
                {name: each.to("cpu", copy=True) for name, each in model.state_dict().items()}
            )
    seen.append({name: each.cpu() for name, each in model.state_dict().items()})
    return seen


def same(lab, ours, theirs):
    return all(
        lab.identical([a, b])
        for run, other in zip(ours, theirs, strict=True)
        for a, b in zip(run, other, strict=True)
    )


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_on_a_pretended_device_the_values_are_those_on_the_cpu(lab, pretended, options, late):
    theirs = lab.run(lambda exchange: train(exchange, "cpu", options), in_process(2))
    accelerator = pretended(PretendedAccelerator(late=late))
    ours = lab.run(lambda exchange: train(exchange, "cpu", options), in_process(2))
    assert same(lab, ours, theirs)
    assert accelerator.asked.count("pinned memory") == 2 * options.get("fragments", 1)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch finds no accelerator here")
@pytest.mark.parametrize("options", OPTIONS)
def test_on_an_accelerator_the_values_are_those_on_the_cpu(lab, options):
    device = torch.accelerator.current_accelerator()
    theirs = lab.run(lambda exchange: train(exchange, "cpu", options), in_process(2))
    ours = lab.run(lambda exchange: train(exchange, device, options), in_process(2))
    assert same(lab, ours, theirs)


def test_the_thread_that_trains_waits_for_no_copy(lab, pretended):
    class Watched(PretendedAccelerator):
        def wait(self, event):
            waiting.append(threading.current_thread())
            super().wait(event)

    waiting = []
    pretended(Watched())
    (exchange,) = in_process(1)
    model = lab.small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, inner, exchange, sync_every=4, delay=2, alpha=0.5) as outer:
        for step in range(8):
            lab.push(model, inner, 0, step)
        assert outer.committed == 2
        assert len(waiting) == 2 * 2, (
            "before it computes what is sent, and before it packs the result"
        )
        assert threading.current_thread() not in waiting


def at_once(act):
    act()
    return lambda _: True


def test_a_failure_while_copying_is_raised_by_the_next_step(lab, pretended):
    class Broken(PretendedAccelerator):
        def wait(self, event):
            raise RuntimeError("the device is lost")

    pretended(Broken())
    (exchange,) = in_process(1, timing=Timing(in_background=at_once))
    model, taken = lab.small_model(), 0
    inner = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps():
        nonlocal taken
        with DiLoCo(model, inner, exchange, sync_every=4, delay=3):
            for taken in range(4):
                lab.push(model, inner, 0, taken)

    with pytest.raises(RuntimeError, match="the device is lost"):
        steps()
    assert taken == 1, "the first step has sent it"


class Slow(PretendedAccelerator):
    """A device that delivers nothing before it is told to."""

    def __init__(self):
        super().__init__()
        self.waited_for, self.go_on = threading.Event(), threading.Event()

    def wait(self, event):
        self.waited_for.set()
        assert self.go_on.wait(600)
        super().wait(event)


class TestLeaving:
    """The block is left while values are being copied from the device."""

    def replica(self, lab, pretended, act):
        self.device = pretended(Slow())
        ended = self.ended = threading.Event()

        def in_thread(act):
            thread = threading.Thread(target=lambda: (act(), ended.set()), daemon=True)
            thread.start()
            return lambda seconds: thread.join(seconds) or not thread.is_alive()

        (exchange,) = in_process(1, timing=Timing(in_background=in_thread))
        self.model = lab.small_model()
        inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        with DiLoCo(self.model, inner, exchange, sync_every=4, delay=3) as self.outer:
            lab.push(self.model, inner, 0, 0)
            assert self.device.waited_for.wait(600)
            act()

    def test_at_its_end_the_sync_is_adopted(self, lab, pretended, monkeypatch):
        result = _flight.Flight.result

        def result_of(flight):
            self.device.go_on.set()
            return result(flight)

        monkeypatch.setattr(_flight.Flight, "result", result_of)
        self.replica(lab, pretended, lambda: None)
        assert self.outer.committed == 1

    def test_by_an_error(self, lab, pretended, monkeypatch):
        """Nobody waits for the device for long, and what it delivers later changes nothing."""
        monkeypatch.setattr(_flight, "_STOP_SECONDS", 0.0)

        def fail():
            raise ValueError("a mistake")

        with pytest.raises(ValueError, match="a mistake"):
            self.replica(lab, pretended, fail)
        held = lab.values(self.model)
        self.device.go_on.set()
        assert self.ended.wait(600)
        assert lab.identical([held, lab.values(self.model)])
        assert self.outer.committed == 0
