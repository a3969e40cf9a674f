"""Torch's default device and dtype are the caller's: what is ours stays on the CPU and in the
dtypes that it has.
"""

import pytest
import torch
from torch import nn

from diloco_core import (
    DiLoCo,
    Elastic,
    ObjectStoreAllReduce,
    StoreExchange,
    in_process,
)
from diloco_core import export as export_model
from diloco_core._store._open import open_store

OUTER = {
    "SGD": {},
    "NAdam": {"outer_optimizer": lambda p: torch.optim.NAdam(p, lr=0.1)},
    "Adagrad": {"outer_optimizer": lambda p: torch.optim.Adagrad(p, lr=0.1)},
}


class Elsewhere:
    """Where tensors are made that say nothing of their device and dtype."""

    def __init__(self, device, dtype):
        self.device, self.dtype = torch.device(device), dtype

    def __enter__(self):
        torch.set_default_dtype(self.dtype)
        self.device.__enter__()

    def __exit__(self, *error):
        self.device.__exit__(*error)
        torch.set_default_dtype(torch.float32)


PLACES = {
    "meta": ("meta", torch.float32),
    "float64": ("cpu", torch.float64),
    "both": ("meta", torch.float64),
}


def make_model(lab):
    with torch.device("cpu"):
        return lab.fill(
            nn.Sequential(
                nn.Linear(3, 5, dtype=torch.float32), nn.BatchNorm1d(5, dtype=torch.float32)
            )
        )


def live(lab, exchange, syncs, **options):
    model = make_model(lab)
    inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    with torch.device("cpu"):
        gradients = torch.Generator().manual_seed(exchange.rank)
    with DiLoCo(model, inner, exchange, sync_every=1, **options) as outer:
        while outer.committed < syncs:
            for parameter in model.parameters():
                parameter.grad = torch.randn(
                    parameter.shape, generator=gradients, device="cpu", dtype=torch.float32
                )
            inner.step()
    state = outer.state_dict()
    assert all(copy.device.type == "cpu" for part in state["fragments"] for copy in part["copy"])
    return lab.values(model)


def runs(lab, folder, options):
    """Fixed over a store; elastic in three incarnations, as one file at the end; between threads; a
    plain mean.
    """
    fixed = StoreExchange(open_store(str(folder / "fixed")), 0, 1)
    found = [live(lab, fixed, 3, **options)]
    for syncs, topology in ((2, "gather"), (4, "gather"), (2, "sharded"), (4, "sharded")):
        store = open_store(str(folder / topology))
        settings = Elastic(
            1, grace=1.0, topology=topology, publish_every=3 if topology == "gather" else None
        )
        found.append(live(lab, StoreExchange(store, 0, 1, settings), syncs, **options))
    export_model(str(folder / "sharded"), str(folder / "model.safetensors"))
    found.append(live(lab, in_process(1)[0], 3, **options))
    value = torch.full((5,), 2.0, device="cpu", dtype=torch.bfloat16)
    with ObjectStoreAllReduce(str(folder / "mean"), rank=0, world_size=1) as mean:
        mean.mean([value])
    return [*found, {"mean": value}]


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("place", PLACES)
def test_the_numbers_are_those_of_the_usual_defaults(lab, tmp_path, outer, place):
    wanted = runs(lab, tmp_path / "wanted", OUTER[outer])
    with Elsewhere(*PLACES[place]):
        found = runs(lab, tmp_path / "found", OUTER[outer])
    for here, there in zip(found, wanted, strict=True):
        assert all(
            here[name].device.type == "cpu" and here[name].dtype is there[name].dtype
            for name in there
        )
        # A step count in double precision changes a correction by a rounding.
        assert all(torch.allclose(here[name], there[name], rtol=1e-5, atol=1e-6) for name in there)
        assert place != "meta" or lab.identical([here, there])
