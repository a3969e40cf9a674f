"""Inner state that cannot be saved, or is restored to something else, is refused by name."""

import pytest
import torch
from loop_lab import exchanges, loop
from training_lab import Loader

from diloco_core import ConfigurationError


class Box:
    """Something of the user's, whose state is what a test says; it keeps what it is given back."""

    def __init__(self, state):
        self.state, self.given = state, None

    def state_dict(self):
        return self.state() if callable(self.state) else self.state

    def load_state_dict(self, state):
        self.given = state


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def live(place, make=sgd, kind="elastic", steps=1, **options):
    """An incarnation that takes some steps, with a save at every sync."""
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    inner = make(list(net.parameters()))
    (exchange,) = exchanges(kind, 1, place)
    options = {"sync_every": 1, "save_inner_every": 1, **options}
    _, _, outer, _ = loop(exchange, net, inner, **options)
    with outer:
        for _ in range(steps):
            net(torch.ones(1, 3)).sum().backward()
            inner.step()
    return outer


def refused(message, *arguments, **options):
    with pytest.raises(ConfigurationError, match=message):
        live(*arguments, **options)


def deep(levels):
    nested = []
    for _ in range(levels):
        nested = [nested]
    return nested


def itself():
    holds = []
    holds.append(holds)
    return holds


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"a": {1, 2}}, r"stateful.loader\['a'\] is a set"),
        ({"a": [1, object()]}, r"stateful.loader\['a'\]\[1\] is an object"),
        ({"a": torch.eye(2).to_sparse()}, r"stateful.loader\['a'\] is a Tensor \(torch.sparse_coo"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "is a tensor of torch.complex64"),
        (lambda: 1 / 0, r"stateful.loader \(Box\) cannot be saved: ZeroDivisionError"),
        (itself, "cannot be saved: RecursionError"),
        (deep(480), r"stateful.loader \(Box\) cannot be saved"),
    ],
    ids=["a set", "an object", "a sparse tensor", "complex numbers", "an error", "itself", "depth"],
)
def test_what_cannot_be_saved_is_refused_before_anything_starts(tmp_path, state, named):
    refused(named, tmp_path, steps=0, stateful={"loader": Box(state)})
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "state",
    [
        # Python itself neither writes nor reads more than 4300 decimal digits.
        *({"seed": number, number: [number, 2**1023, True]}
          for number in (2**1024, -(10**5000), 3**30000 + 1)),
        deep(100),
    ],
    ids=["short", "negative", "long", "depth"],
)  # fmt: skip
def test_long_numbers_and_nested_lists_come_back(tmp_path, state):
    box = Box(state)
    live(tmp_path, stateful={"loader": box})
    live(tmp_path, stateful={"loader": box})
    assert box.given == state


def test_more_than_could_be_read_again_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("diloco_core._inner._file.MOST_HEADER_BYTES", 5000)
    loader = Loader()
    loader.seen = list(range(1000))
    refused(
        r"stateful.loader \(Loader\) takes .* return long lists .* as tensors",
        tmp_path,
        stateful={"loader": loader},
    )


def test_what_would_never_be_saved_is_refused(tmp_path):
    message = r"stateful was given \(for 'loader'\).*save_inner_every=0"
    refused(message, tmp_path, stateful={"loader": Loader()}, save_inner_every=0)
    refused(r"pass an object with state_dict\(\)", tmp_path, stateful={"x": 3})
    message = "has no store that could keep their states"
    refused(message, tmp_path, kind="threads", stateful={"x": Loader()})
    assert not (tmp_path / "manifest.json").exists()


class Quantized(torch.Tensor):
    """As torchao's optimizers keep their state in subclasses of a tensor."""


def keeping(make):
    """An optimizer that keeps something in its state."""

    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["odd"] = make(parameter.detach())

    return lambda parameters: Odd(parameters, lr=0.1)


def test_an_optimizers_state_is_tried_after_its_first_step(tmp_path):
    odd = keeping(lambda values: object())
    message = r"optimizer\['state'\]\[0\]\['odd'\] is an object"
    with pytest.raises(ConfigurationError, match=message):
        live(tmp_path / "object", odd, sync_every=2, steps=2)
    quantized = keeping(lambda values: values.as_subclass(Quantized))
    refused(r"Quantized.*With save_inner_every=0 the", tmp_path / "saved", quantized)
    assert live(tmp_path / "not saved", quantized, save_inner_every=0).committed == 1


def adamw(parameters):
    return torch.optim.AdamW(parameters)


@pytest.mark.parametrize(
    "later",
    [
        lambda p: torch.optim.AdamW([p[2], p[1], p[0], p[3]]),
        lambda p: torch.optim.AdamW([{"params": p[:2]}, {"params": p[2:]}]),
    ],
    ids=["another order", "other groups"],
)
def test_a_state_is_not_given_to_other_parameters(tmp_path, later):
    """By number alone, each weight would get the momentum of the other one."""
    live(tmp_path, adamw)
    message = "optimizer held other parameters, or held them in another order"
    refused(message, tmp_path, later)
    live(tmp_path, adamw)


class Fussy(Box):
    """Saves, and does not take back what it saved."""

    def load_state_dict(self, state):
        raise KeyError("offset")


def test_a_state_that_does_not_fit_is_refused_by_name(tmp_path, monkeypatch):
    live(tmp_path / "kind", adamw)
    refused(r"optimizer was AdamW and is SGD", tmp_path / "kind", sgd)
    refused("the same stateful=", tmp_path / "kind", adamw, stateful={"loader": Loader()})
    fussy = {"stateful": {"loader": Fussy({"position": 3})}}
    live(tmp_path / "fussy", **fussy)
    message = r"stateful\.loader \(Fussy\) refuses the state .*KeyError: 'offset'"
    refused(message, tmp_path / "fussy", **fussy)
    with monkeypatch.context() as patched:
        patched.setattr("diloco_core._inner._state.random_state", lambda: {"numpy": 5})
        live(tmp_path / "random")
    refused(r"random generators refuse .*KeyError: 'torch'", tmp_path / "random")


@pytest.mark.sampled
@pytest.mark.parametrize("change", [None, "a schedule", "the program"])
def test_settings_that_are_given_anew_are_named_where_the_saved_ones_stay(tmp_path, caplog, change):
    """Those that have changed in the block since are not: that is no mistake of anybody's."""

    def halve(inner, *_):
        inner.param_groups[0]["lr"] /= 2

    def incarnation(lr):
        made, stateful = [], {}

        def make(parameters):
            made.append(inner := torch.optim.AdamW(parameters, lr=lr, weight_decay=0.5))
            if change == "a schedule":
                schedule = stateful["schedule"] = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
                inner.register_step_post_hook(lambda *_: schedule.step())
            elif change:
                inner.register_step_post_hook(halve)
            return inner

        live(tmp_path, make, stateful=stateful)
        return made[-1].param_groups[0]["lr"]

    before = [incarnation(0.25), incarnation(0.25)]
    assert before == ([0.125, 0.0625] if change else [0.25, 0.25])
    assert "that were saved" not in caplog.text
    for _ in range(2):
        before.append(incarnation(0.5))
        (record,) = [record for record in caplog.records if "that were saved" in record.message]
        assert record.levelname == "WARNING"
        assert f"optimizer group 0: lr={before[-2]} (not 0.5)" in record.message
        assert "weight_decay" not in record.message
        caplog.clear()
