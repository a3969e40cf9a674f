"""The outer loop makes the same numbers as torchft's DiLoCo, step by step."""

import json
from pathlib import Path

import pytest
import torch
from delay_lab import Refusing

from diloco_core import (
    DiLoCo,
    Elastic,
    ManagerExchange,
    StoreExchange,
    in_process,
)
from diloco_core._store._open import open_store

FOLDER = Path(__file__).parent / "trajectories"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
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
    outer = DiLoCo(
        model,
        inner,
        exchange,
        sync_every=config["sync_every"],
        fragments=list(model.parts),
        outer_lr=config["outer_lr"],
        outer_momentum=config["momentum"],
        nesterov=config["nesterov"],
        delay=config["delay"],
        alpha=config["alpha"],
    )
    with outer:
        for _ in range(config["steps"]):
            triples = zip(model.weights, targets, curvature, strict=True)
            sum((c * (w - t) ** 2).sum() for w, t, c in triples).backward()
            inner.step()
            inner.zero_grad()
            now = {
                "local": [w.detach().clone() for w in model.weights],
                "committed": outer.committed,
            }
            if not outer.syncing:  # a sync under way may have changed its fragment already, or not
                state = outer.state_dict()
                now["global"] = [fragment["copy"][0].clone() for fragment in state["fragments"]]
                now["momentum"] = [
                    momentum(state, f, w.numel()) for f, w in enumerate(model.weights)
                ]
            seen.append(now)
    return seen


def exchanges(kind, replicas, tmp_path, refused=()):
    if kind == "store":
        store = open_store(str(tmp_path))
        return [StoreExchange(store, rank, replicas, chunk_bytes=8) for rank in range(replicas)]
    if kind in ("sharded", "gather"):
        store, settings = open_store(str(tmp_path)), Elastic(replicas, topology=kind)
        return [StoreExchange(store, rank, replicas, settings) for rank in range(replicas)]
    threads = in_process(replicas)
    if kind == "manager":
        return [
            ManagerExchange(Refusing(thread, refused), rank=thread.rank, world_size=replicas)
            for thread in threads
        ]
    return threads


def close(ours, theirs):
    return torch.allclose(ours, repeated(theirs), rtol=1e-12, atol=1e-12)


CASES = [
    (name, kind)
    for name in NAMES
    for kind in ("threads", "store", "sharded", "gather", "manager")
    if kind == "manager" or not name.endswith("fail2")  # only a manager refuses commits
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_recorded_runs_of_torchft_are_matched(lab, name, kind, tmp_path):
    recorded = json.loads((FOLDER / f"{name}.json").read_text())
    config = recorded["config"]
    runs = lab.run(
        lambda exchange: trajectory(recorded, exchange),
        exchanges(kind, config["replicas"], tmp_path, config["fail_attempts"]),
    )
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


def test_all_files_are_there():
    assert NAMES == [
        "r1_f1_h4",
        "r2_f1_h5",
        "r2_f2_h4_fedavg",
        "r2_f3_h9_d2_a025_heavyball",
        "r3_f2_h6_d1_a05_fail2",
        "r4_f2_h6_adamw",
    ]


# torchft's own fixture: two replicas, H = 6, every parameter starts at 1, gradient 2, inner lr 1,
# outer SGD with lr 2. For every delay and alpha, the parameters of the two fragments before each
# step.
_ALONE = [1 - 2 * step for step in range(16)]
FIXTURE = {
    (0, 0.0): (
        [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
        [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
    ),
    (0, 0.5): (
        [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25],
        [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
    ),
    (0, 1.0): (_ALONE, _ALONE),
    (1, 0.0): (
        [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47],
        [1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45],
    ),
    (1, 0.5): (
        [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75],
        [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
    ),
    (1, 1.0): (_ALONE, _ALONE),
}


@pytest.mark.parametrize(("delay", "alpha"), FIXTURE)
def test_two_fragments_take_turns(lab, delay, alpha):
    def replica(exchange):
        model = Parts([[1.0], [1.0]])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        seen = []
        options = {
            "sync_every": 6,
            "fragments": list(model.parts),
            "outer_lr": 2.0,
            "outer_momentum": 0.0,
            "delay": delay,
            "alpha": alpha,
        }
        with DiLoCo(model, inner, exchange, **options):
            for _ in range(16):
                seen.append([w[0].item() for w in model.weights])
                assert all((w == w[0]).all() for w in model.weights)
                for w in model.weights:
                    w.grad = torch.full_like(w, 2.0)
                inner.step()
        return seen

    first, second = FIXTURE[delay, alpha]
    for seen in lab.run(replica, in_process(2)):
        assert [values[0] for values in seen] == first
        assert [values[1] for values in seen] == second
