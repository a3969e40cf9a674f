"""The outer loop makes the same numbers as torchft's DiLoCo, step by step."""

import json
from pathlib import Path

import pytest
import torch
from loop_lab import KINDS, exchanges

from diloco_core import DiLoCo

FOLDER = Path(__file__).parent / "trajectories"
NAMES = [
    "r1_f1_h4", "r2_f1_h5", "r2_f2_h4_fedavg", "r2_f3_h9_d2_a025_heavyball",
    "r3_f2_h6_d1_a05_fail2", "r4_f2_h6_adamw",
]  # fmt: skip
# The recorded problems are vectors of three components that do not touch each other. Repeating them
# changes no number, but makes them long enough that every replica owns a shard.
REPEATS = 32


def repeated(values):
    return torch.tensor(values, dtype=torch.float64).repeat(REPEATS)


class Parts(torch.nn.Module):
    """One parameter per fragment."""

    def __init__(self, values):
        super().__init__()
        self.parts = torch.nn.ModuleList()
        for value in values:
            part = torch.nn.Module()
            part.weight = torch.nn.Parameter(repeated(value))
            self.parts.append(part)

    @property
    def weights(self):
        return [part.weight for part in self.parts]


def momentum(state, fragment, size):
    """The momentum of the shards that a replica owns; NaN elsewhere."""
    found = torch.full((size,), torch.nan, dtype=torch.float64)
    for entry in state["fragments"][fragment]["outer"]["ranges"]:
        _, start, stop = entry["range"]
        if "momentum_buffer" in entry["tensors"]:
            found[start:stop] = entry["tensors"]["momentum_buffer"]
    return found


def trajectory(recorded, exchange):
    """One replica's run: what it held after every inner step."""
    config = recorded["config"]
    model = Parts(recorded["init"])
    targets = [repeated(t) for t in recorded["targets"][exchange.rank]]
    curvature = [repeated(c) for c in recorded["curvature"]]
    if config["inner"] == "sgd":
        inner = torch.optim.SGD(model.parameters(), lr=config["inner_lr"])
    else:
        inner = torch.optim.AdamW(
            model.parameters(), lr=config["inner_lr"], weight_decay=0.1, betas=(0.9, 0.95)
        )
    seen = []
    same = ("sync_every", "outer_lr", "nesterov", "delay", "alpha")
    options = {name: config[name] for name in same} | {"outer_momentum": config["momentum"]}
    with DiLoCo(model, inner, exchange, fragments=list(model.parts), **options) as outer:
        for _ in range(config["steps"]):
            triples = zip(model.weights, targets, curvature, strict=True)
            sum((c * (w - t) ** 2).sum() for w, t, c in triples).backward()
            inner.step()
            inner.zero_grad()
            local = [w.detach().clone() for w in model.weights]
            now = {"local": local, "committed": outer.committed}
            if not outer.syncing:  # a sync under way may have changed its fragment already, or not
                state = outer.state_dict()
                now["global"] = [fragment["copy"][0].clone() for fragment in state["fragments"]]
                now["momentum"] = [momentum(state, f, len(w)) for f, w in enumerate(model.weights)]
            seen.append(now)
    return seen


def close(ours, theirs):
    return torch.allclose(ours, repeated(theirs), rtol=1e-12, atol=1e-12)


CASES = [
    (name, kind)
    for name in NAMES
    for kind in (*KINDS, "manager")
    if kind == "manager" or not name.endswith("fail2")  # only a manager refuses commits
]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_recorded_runs_of_torchft_are_matched(lab, name, kind):
    recorded = json.loads((FOLDER / f"{name}.json").read_text())
    config = recorded["config"]
    more = {"chunk_bytes": 8} if kind == "store" else {}
    each = exchanges(kind, config["replicas"], refused=config["fail_attempts"], **more)
    runs = lab.run(lambda exchange: trajectory(recorded, exchange), each)
    # Each shard's momentum is with its owner; over a manager and in gather every replica owns
    # everything.
    owners_wanted = len(runs) if kind in ("manager", "gather") else 1
    compared = 0
    for step in range(config["steps"]):
        whole = all("global" in run[step] for run in runs)
        assert whole or config["delay"]
        compared += whole
        for rank, run in enumerate(runs):
            ours, theirs = run[step], recorded["replicas"][rank][step]
            assert ours["committed"] == theirs["committed"]
            for fragment in range(config["fragments"]):
                place = (step, rank, fragment)
                assert close(ours["local"][fragment], theirs["local"][fragment]), place
                if whole:
                    assert close(ours["global"][fragment], theirs["global"][fragment]), place
        for fragment in range(config["fragments"]) if whole else ():
            theirs = recorded["replicas"][0][step]["momentum"][fragment]
            parts = torch.stack([run[step]["momentum"][fragment] for run in runs])
            owned = parts.isnan().logical_not()
            owners = owned.sum(0)
            if theirs is None:
                assert owners.sum() == 0
            else:
                assert (owners == owners_wanted).all()
                assert owned.any(1).all(), "every replica owns something"
                assert close(parts.nan_to_num(0.0).sum(0) / owners_wanted, theirs), (step, fragment)
    period = config["sync_every"] // config["fragments"]
    assert compared == config["steps"] * (period - config["delay"]) // period
