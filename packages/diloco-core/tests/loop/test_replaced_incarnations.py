"""An incarnation whose rank a newer one has claimed was replaced, and does not count as failed."""

import pytest
import torch
from training_lab import push, small_model

from diloco_core import DiLoCo, Elastic, FencedError, StoreExchange, SyncError
from diloco_core._store._open import open_store
from diloco_core._wire._fields import Fields
from diloco_core._wire._sealed import unseal


def incarnation(folder):
    exchange = StoreExchange(open_store(str(folder)), 0, 1, Elastic(1, topology="gather"))
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return exchange, model, inner, DiLoCo(model, inner, exchange, sync_every=1)


def test_it_leaves_and_says_so(tmp_path):
    exchange, model, inner, outer = incarnation(tmp_path)

    def goes_on():
        with outer:
            push(model, inner, 0, 0)
            with incarnation(tmp_path)[3]:
                for step in range(9):
                    push(model, inner, 0, step)

    with pytest.raises(FencedError):
        goes_on()
    with pytest.raises(SyncError, match="has ended, because it was replaced"):
        exchange.join(None)
    ends = [path for path in tmp_path.rglob("*") if "leave" in path.name]
    assert ends
    for path in ends:
        key = str(path.relative_to(tmp_path))
        said = Fields(unseal("farewell", key, path.read_bytes(), key), key)
        assert said.text("event") == "left"
