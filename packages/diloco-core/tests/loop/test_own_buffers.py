"""With ``buffers="none"`` each rank has its own, and gets them back with its inner state in the next life."""

import pytest
import torch
from torch import nn

from diloco_core import DiLoCo, Elastic, ElasticExchange, ObjectStoreExchange
from diloco_core._loop._own_buffers import OwnBuffers
from diloco_core._store._open import open_store


def exchanges(kind, uri, resume):
    stores = [open_store(uri) for _ in range(2)]
    if kind == "strict":
        return [ObjectStoreExchange(s, rank, 2, resume=resume) for rank, s in enumerate(stores)]
    return [ElasticExchange(store, rank, 2, Elastic(2)) for rank, store in enumerate(stores)]


def life(lab, exchange, until, policy="none"):
    net = lab.fill(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    with DiLoCo(net, inner, exchange, sync_every=1, buffers=policy, save_inner_every=1) as outer:
        began = [buffer.clone() for buffer in net.buffers()]
        while outer.committed < until:
            net(torch.ones(5, 3) * (exchange.rank + 1)).sum().backward()
            lab.push(net, inner, exchange.rank, outer.inner_steps)
    return began, [buffer.clone() for buffer in net.buffers()]


def same(ours, theirs):
    return all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("kind", ["strict", "elastic"])
def test_they_come_back(lab, kind):
    uri = f"memory://own-buffers/{kind}"
    first = lab.run(lambda exchange: life(lab, exchange, 2), exchanges(kind, uri, False))
    second = lab.run(lambda exchange: life(lab, exchange, 3), exchanges(kind, uri, True))
    for (_, ended), (began, _) in zip(first, second, strict=True):
        assert same(ended, began)
    assert not same(first[0][1], first[1][1])


def test_other_buffers_are_refused():
    saved = OwnBuffers(nn.BatchNorm1d(4)).state_dict()
    with pytest.raises(ValueError, match=r"running_mean': 16.*not .*'running_mean': 20"):
        OwnBuffers(nn.BatchNorm1d(5)).load_state_dict(saved)
