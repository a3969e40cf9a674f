"""The outer loop makes the same numbers as torchft's DiLoCo, step by step."""

import json
from pathlib import Path

import pytest
import torch

from diloco_core import DiLoCo, ManagerExchange, MockManager, ObjectStoreExchange, in_process
from diloco_core._store._open import open_store

FOLDER = Path(__file__).parent / "trajectories"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
# The recorded problems are vectors of three components that do not touch each other. Repeating them changes no number, but
# makes them long enough that every replica owns a shard.
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
    outer = DiLoCo(
        model,
        inner,
        exchange,
        sync_every=config["sync_every"],
        fragments=list(model.parts),
        outer_lr=config["outer_lr"],
        outer_momentum=config["momentum"],
        nesterov=config["nesterov"],
    )
    with outer:
        for _ in range(config["steps"]):
            triples = zip(model.weights, targets, curvature, strict=True)
            sum((c * (w - t) ** 2).sum() for w, t, c in triples).backward()
            inner.step()
            inner.zero_grad()
            state = outer.state_dict()
            seen.append(
                {
                    "local": [w.detach().clone() for w in model.weights],
                    "global": [fragment["copy"][0].clone() for fragment in state["fragments"]],
                    "momentum": [
                        momentum(state, f, w.numel()) for f, w in enumerate(model.weights)
                    ],
                    "committed": outer.committed,
                }
            )
    return seen


def exchanges(kind, replicas, tmp_path):
    if kind == "store":
        store = open_store(str(tmp_path))
        return [
            ObjectStoreExchange(store, rank, replicas, chunk_bytes=8) for rank in range(replicas)
        ]
    threads = in_process(replicas)
    if kind == "manager":
        return [
            ManagerExchange(MockManager(thread), rank=thread.rank, world_size=replicas)
            for thread in threads
        ]
    return threads


def close(ours, theirs):
    return torch.allclose(ours, repeated(theirs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["threads", "store", "manager"])
@pytest.mark.parametrize("name", NAMES)
def test_recorded_runs_of_torchft_are_matched(lab, name, kind, tmp_path):
    recorded = json.loads((FOLDER / f"{name}.json").read_text())
    config = recorded["config"]
    runs = lab.run(
        lambda exchange: trajectory(recorded, exchange),
        exchanges(kind, config["replicas"], tmp_path),
    )
    # Each shard's momentum is with its owner; over a manager every replica owns everything.
    owners_wanted = len(runs) if kind == "manager" else 1
    for step in range(config["steps"]):
        for rank, run in enumerate(runs):
            ours, theirs = run[step], recorded["replicas"][rank][step]
            assert ours["committed"] == theirs["committed"]
            for fragment in range(config["fragments"]):
                assert close(ours["local"][fragment], theirs["local"][fragment]), (
                    step,
                    rank,
                    fragment,
                )
                assert close(ours["global"][fragment], theirs["global"][fragment]), (
                    step,
                    rank,
                    fragment,
                )
        for fragment in range(config["fragments"]):
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


def test_all_files_are_there():
    assert NAMES == ["r1_f1_h4", "r2_f1_h5", "r2_f2_h4_fedavg", "r4_f2_h6_adamw"]


def test_two_fragments_take_turns(lab):
    """Two replicas, H = 6, every parameter starts at 1, gradient 2, inner lr 1, outer SGD with lr 2 (torchft's own fixture)."""
    first = [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59]
    second = [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53]

    def replica(exchange):
        model = Parts([[1.0], [1.0]])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        seen = []
        options = {
            "sync_every": 6,
            "fragments": list(model.parts),
            "outer_lr": 2.0,
            "outer_momentum": 0.0,
        }
        with DiLoCo(model, inner, exchange, **options):
            for _ in range(16):
                seen.append([w[0].item() for w in model.weights])
                assert all((w == w[0]).all() for w in model.weights)
                for w in model.weights:
                    w.grad = torch.full_like(w, 2.0)
                inner.step()
        return seen

    for seen in lab.run(replica, in_process(2)):
        assert [values[0] for values in seen] == first
        assert [values[1] for values in seen] == second
