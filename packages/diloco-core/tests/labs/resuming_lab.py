"""A run that is stopped, saved and resumed, step by step."""

import io

import torch
from torch import nn

from diloco_core import DiLoCo

REPLICAS = 3


STEPS = 11


def make_model(lab, dtype):
    model = nn.Sequential(nn.Linear(17, 19), nn.BatchNorm1d(19), nn.Linear(19, 3))
    if dtype == "mixed":
        model[2].double()
    return lab.fill(model if dtype == "mixed" else model.to(dtype))


OUTER = {
    "Nesterov": {},
    "plain SGD": {"outer_momentum": 0.0},
    "Adam": {"outer_optimizer": lambda p: torch.optim.Adam(p, lr=0.1)},
    "NAdam": {"outer_optimizer": lambda p: torch.optim.NAdam(p, lr=0.1)},
    "RMSprop": {
        "outer_optimizer": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5)
    },
}


class Experiment:
    """A run that can be stopped after any step and gone on with."""

    def __init__(self, lab, *, dtype=torch.float32, **options):
        self.lab = lab
        self.dtype = dtype
        self.options = {"sync_every": 4, "fragments": 2, **options}

    def parts(self, exchange):
        model = make_model(self.lab, self.dtype)
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, inner, DiLoCo(model, inner, exchange, **self.options)

    def steps(self, model, inner, rank, steps):
        for step in steps:
            self.lab.push(model, inner, rank, step)
            model[1].running_mean.add_(0.25 * (1 + rank))

    def whole(self, exchange):
        """All steps in one incarnation: what the model and the outer loop hold at the end."""
        model, inner, outer = self.parts(exchange)
        with outer:
            self.steps(model, inner, exchange.rank, range(STEPS))
        return self.held(model, inner, outer)

    def until(self, stop, resumed_from=None, start=0):
        """The state after ``stop`` steps, as bytes."""

        def replica(exchange):
            model, inner, outer = self.parts(exchange)
            if resumed_from is not None:
                self.load(resumed_from[exchange.rank], model, inner, outer)
            with outer:
                self.steps(model, inner, exchange.rank, range(start, stop))
                saved = io.BytesIO()
                torch.save([model.state_dict(), inner.state_dict(), outer.state_dict()], saved)
            return saved.getvalue()

        return replica

    def since(self, saved, start):
        """The rest of the run, from saved bytes."""

        def replica(exchange):
            model, inner, outer = self.parts(exchange)
            self.load(saved[exchange.rank], model, inner, outer)
            with outer:
                self.steps(model, inner, exchange.rank, range(start, STEPS))
            return self.held(model, inner, outer)

        return replica

    def load(self, saved, *parts):
        # weights_only: a state holds tensors and plain values, nothing that runs code when it is
        # read.
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)

    def held(self, model, inner, outer):
        state = outer.state_dict()
        held = {f"model.{name}": value for name, value in self.lab.values(model).items()}
        for number, parameter in enumerate(model.parameters()):
            held[f"inner.{number}"] = inner.state[parameter]["exp_avg"].clone()
        for number, fragment in enumerate(state["fragments"]):
            for group, copy in enumerate(fragment["copy"]):
                held[f"copy.{number}.{group}"] = copy.clone()
            for name in {
                name for entry in fragment["outer"]["ranges"] for name in entry["tensors"]
            }:
                # Chunks of another size cut the same elements elsewhere.
                parts = [entry["tensors"][name] for entry in fragment["outer"]["ranges"]]
                held[f"outer.{number}.{name}"] = torch.cat(parts)
            for name, value in fragment["outer"]["scalars"].items():
                held[f"outer.{number}.{name}"] = torch.tensor(value)
        held["counters"] = torch.tensor([outer.committed, outer.inner_steps])
        return held


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )
