"""The sizes of records and headers that plans count are about those of the exchange: a change of
their format shows here.
"""

import planned_lab
import pytest
import torch
import training_lab
from safetensors import safe_open

from diloco_core import DiLoCo, Transfer
from diloco_core._arithmetic._rate import Rate, values_of
from diloco_core._planner import _model
from diloco_core._planner._model import Model
from diloco_core._run._records._keys import Delta
from diloco_core._run._records._records import Commit, Done
from diloco_core._store._open import open_store

HEX = "0123456789abcdef"
SYNC = 1000


@pytest.mark.parametrize("replicas", [1, 2, 7, 64, 1000])
def test_records_of_a_sync(replicas):
    """Of a run whose shards are as many as its replicas."""
    ranks = range(replicas)
    members = tuple(Delta(SYNC, rank, 1, 4950, 5000, HEX, HEX) for rank in ranks)
    rate = Rate(values_of("3fe6666666666666"))
    commit = Commit(
        SYNC, 0, HEX, HEX, members, dict.fromkeys(ranks, 5000), SYNC, rate=rate, run=HEX
    )
    sums = tuple(2**63 + number for number in ranks)
    model = Model(1e4, 1e4, replicas, Transfer())
    assert model.shards == replicas
    assert len(commit.to_json()) == pytest.approx(model.commit, rel=0.05)
    assert len(Done(SYNC, 0, sums, sums, commit, True).to_json()) == pytest.approx(
        model.done, rel=0.05
    )


@pytest.mark.parametrize("kind", ["fixed", "sharded"])
def test_what_lies_in_the_store(tmp_path, kind):
    """Of what depends on settings, names and machines, the sizes are usual ones."""
    stores = [open_store(str(tmp_path)) for _ in range(3)]

    def replica(exchange):
        layers = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(4)))
        model = torch.nn.ModuleDict({"transformer_layers": layers})  # names as long as usual
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, exchange, sync_every=1):
            training_lab.push(model, inner, exchange.rank, 0)

    training_lab.run(
        replica,
        [planned_lab.exchange_of(kind, store, rank, 3, 1) for rank, store in enumerate(stores)],
    )
    values = 4 * 4 * 420
    model = Model(values, values, 3, Transfer(), fixed=kind == "fixed", tensors=8)
    size = {path.name: path.stat().st_size for path in tmp_path.rglob("*.json")}
    assert 2 * size["manifest.json"] + size["0001.json"] == pytest.approx(model.watched, rel=0.1)
    if kind == "fixed":
        (beat, *_) = (tmp_path / "beats").iterdir()
        assert beat.stat().st_size == pytest.approx(_model.BEAT, abs=4)
    (published, *_) = (path for path in tmp_path.rglob("state/*/*") if _holds_momentum(path))
    assert published.stat().st_size == pytest.approx(model.published, rel=0.05)


def _holds_momentum(path):
    if path.suffix != ".safetensors":
        return False
    with safe_open(path, "pt") as file:
        return any(key.startswith("outer.") for key in file.keys())  # noqa: SIM118
