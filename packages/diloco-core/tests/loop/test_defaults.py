"""Torch's default device and dtype are the caller's, and change nothing of ours."""

import pytest
import torch
from loop_lab import exchanges, loop
from torch import nn

from diloco_core import ObjectStoreAllReduce
from diloco_core import export as export_model

OUTER = {
    "NAdam": {"outer_optimizer": lambda p: torch.optim.NAdam(p, lr=0.1)},
    "Adagrad": {"outer_optimizer": lambda p: torch.optim.Adagrad(p, lr=0.1)},
}


class Elsewhere:
    """Return where tensors are made that say nothing of their device and dtype."""

    def __init__(self, device, dtype):
        self.device, self.dtype = torch.device(device), dtype

    def __enter__(self):
        torch.set_default_dtype(self.dtype)
        self.device.__enter__()

    def __exit__(self, *error):
        self.device.__exit__(*error)
        torch.set_default_dtype(torch.float32)


PLACES = {"meta": ("meta", torch.float32), "float64": ("cpu", torch.float64)}


def live(lab, exchange, syncs, **options):
    with torch.device("cpu"):
        layers = nn.Linear(3, 5, dtype=torch.float32), nn.BatchNorm1d(5, dtype=torch.float32)
        model, generator = lab.fill(nn.Sequential(*layers)), torch.Generator().manual_seed(1)
    inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    _, _, outer, _ = loop(exchange, model, inner, sync_every=1, **options)
    plain = {"device": "cpu", "dtype": torch.float32}
    with outer:
        while outer.committed < syncs:
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator, **plain)
            inner.step()
    copies = [copy for part in outer.state_dict()["fragments"] for copy in part["copy"]]
    assert all(copy.device.type == "cpu" for copy in copies)
    return lab.values(model)


def runs(lab, folder, options):
    """Return what several kinds of runs come to, and a plain mean."""
    found = [live(lab, *exchanges(kind, 1), 3, **options) for kind in ("threads", "store")]
    for syncs, kind in ((2, "gather"), (4, "gather"), (2, "sharded"), (4, "sharded")):
        published = {"publish_every": 3} if kind == "gather" else {}
        each = exchanges(kind, 1, folder / kind, grace=1.0, **published)
        found.append(live(lab, *each, syncs, **options))
    export_model(str(folder / "sharded"), str(folder / "model.safetensors"))
    value = torch.full((5,), 2.0, device="cpu", dtype=torch.bfloat16)
    with ObjectStoreAllReduce(str(folder / "mean"), rank=0, world_size=1) as mean:
        mean.mean([value])
    return [*found, {"mean": value}]


@pytest.mark.sampled
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
