"""Steps of a compiled inner step are counted and synced, or the error says what to do."""

import warnings

import pytest
import torch
from loop_lab import loop

from diloco_core import ConfigurationError

# torch 2.11 warns of what it imports itself.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
SLOW = pytest.mark.slow  # tracing takes seconds


class Within(torch.optim.SGD):
    """A step that takes its parent's step inside of it."""

    def step(self, closure=None):
        return super().step(closure)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "its parent's step": lambda p: Within(p, lr=0.01),
}


WAYS = ("the step", "a function around it", "the step, replaced", "the whole train step")


def train_step(model, inner, way, compiled):
    step = inner.step
    if way == "the step":
        step = compiled(inner.step)
    elif way == "a function around it":
        step = compiled(lambda: inner.step())
    elif way == "the step, replaced":
        step = inner.step = compiled(inner.step)

    def train():
        model(torch.ones(5, 3)).pow(2).mean().backward()
        step()
        inner.zero_grad()

    return compiled(train) if way == "the whole train step" else train


def trained(lab, way, make, compiled):
    """Return what the model holds, and how many inner steps each sync covered."""
    model = lab.small_model()
    model, inner, outer, reports = loop(None, model, make(model.parameters()), sync_every=3)
    with warnings.catch_warnings(), outer:
        warnings.simplefilter("ignore")  # of the compiler's own imports
        train = train_step(model, inner, way, compiled)
        for _ in range(7):
            train()
    assert outer.inner_steps == 7
    return lab.values(model), [report.inner_steps for report in reports]


@pytest.mark.parametrize(
    ("way", "optimizer"),
    [
        pytest.param(way, name, marks=[] if (way, name) == ("the step", "SGD") else SLOW)
        for way in WAYS
        for name in OPTIMIZERS
    ],
)
def test_a_compiled_step_is_counted_and_synced(lab, way, optimizer):
    torch._dynamo.reset()
    make = OPTIMIZERS[optimizer]
    plain, covered = trained(lab, way, make, lambda step: step)
    values, same = trained(lab, way, make, lambda step: torch.compile(step, backend="eager"))
    assert covered == same == [3, 3, 1]
    # torch computes Adam's corrections in another order where it is compiled.
    for name, tensor in plain.items():
        torch.testing.assert_close(values[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_step_that_is_captured_into_a_cuda_graph_is_refused(lab, monkeypatch):
    """Its replays would call no hooks.

    The capture was seen on a GPU; here torch only says that it is under way.
    """
    model, inner, outer, _ = loop(None, lab.small_model(), sync_every=3)
    with outer:
        train_step(model, inner, "", None)()
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(ConfigurationError, match=r"0 \(SGD\) steps while a CUDA graph"):
            inner.step()
        monkeypatch.undo()
    assert outer.inner_steps == 1


def test_a_graph_without_breaks_is_refused_with_what_to_do(lab):
    torch._dynamo.reset()
    whole = torch.compile(lambda step: step(), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"(?s)DiLoCo.*compile the step without fullgraph=True"):
        trained(lab, "the step", OPTIMIZERS["SGD"], lambda step: lambda: whole(step))
