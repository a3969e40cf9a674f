"""With ``buffers="none"`` each rank has its own, and gets them back with its inner state in the
next incarnation.
"""

import copy

import pytest
import torch
from torch import nn

from diloco_core import ConfigurationError, DiLoCo, Elastic, StoreExchange
from diloco_core._model._own_buffers import OwnBuffers
from diloco_core._store._open import open_store


def exchanges(kind, uri, resume):
    stores = [open_store(uri) for _ in range(2)]
    if kind == "fixed":
        return [StoreExchange(s, rank, 2, resume=resume) for rank, s in enumerate(stores)]
    return [StoreExchange(store, rank, 2, Elastic(2)) for rank, store in enumerate(stores)]


def incarnation(lab, exchange, until, policy="none", every=1):
    net = lab.fill(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    with DiLoCo(
        net, inner, exchange, sync_every=1, buffers=policy, save_inner_every=every
    ) as outer:
        began = [buffer.clone() for buffer in net.buffers()]
        while outer.committed < until:
            net(torch.ones(5, 3) * (exchange.rank + 1)).sum().backward()
            lab.push(net, inner, exchange.rank, outer.inner_steps)
    return began, [buffer.clone() for buffer in net.buffers()]


@pytest.mark.parametrize("kind", ["fixed", "elastic"])
@pytest.mark.parametrize("policy", ["none", "mean"])
def test_buffers_that_were_never_saved_are_spoken_of(lab, caplog, kind, policy):
    caplog.set_level("INFO", logger="diloco_core")
    uri = f"memory://own-buffers/never-{kind}-{policy}"
    for until, resume in (2, False), (3, True):
        caplog.clear()
        lab.run(
            lambda e, until=until: incarnation(lab, e, until, policy, every=0),
            exchanges(kind, uri, resume),
        )
    told = [record for record in caplog.records if "fresh inner state" in record.getMessage()]
    assert {record.levelname for record in told} == {"WARNING" if policy == "none" else "INFO"}
    assert all("with save_inner_every=0" in record.getMessage() for record in told)
    assert ("the buffers (buffers='none')" in caplog.text) is (policy == "none")


def same(ours, theirs):
    return all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("kind", ["fixed", "elastic"])
def test_they_come_back(lab, kind):
    uri = f"memory://own-buffers/{kind}"
    first = lab.run(lambda exchange: incarnation(lab, exchange, 2), exchanges(kind, uri, False))
    second = lab.run(lambda exchange: incarnation(lab, exchange, 3), exchanges(kind, uri, True))
    for (_, ended), (began, _) in zip(first, second, strict=True):
        assert same(ended, began)
    assert not same(first[0][1], first[1][1])


class Holder(nn.Module):
    """A model with one buffer beside its parameters."""

    def __init__(self, buffer=None):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("held", buffer)


def back(ended, fresh):
    """What a new model holds after it has taken the buffers of one that has ended."""
    saved = copy.deepcopy(OwnBuffers(ended).state_dict())
    OwnBuffers(fresh).load_state_dict(saved)
    return fresh


REBUILT = {
    "None at first": (None, torch.arange(3.0)),
    "grown": (torch.zeros(0), torch.arange(3.0)),
    "another dtype": (torch.zeros(2), torch.ones(2, dtype=torch.int64)),
    "expanded": (torch.zeros(()).expand(4), torch.ones(()).expand(4)),
    "expanded at first": (torch.zeros(1).expand(3, 2), torch.arange(6.0).view(3, 2)),
    "overlapping": (torch.zeros(4).as_strided((2, 3), (1, 1)), torch.arange(6.0).view(2, 3)),
    "None at last": (torch.ones(2), None),
    "transposed": (torch.zeros(3, 2).t(), torch.arange(6.0).view(3, 2).t()),
    "conjugate": (torch.zeros(2, dtype=torch.complex64), torch.full((2,), 1 + 2j).conj()),
}


@pytest.mark.parametrize("case", REBUILT)
def test_what_modules_have_assigned_comes_back(case):
    at_first, at_last = REBUILT[case]
    held = back(Holder(at_last), Holder(at_first)).held
    assert (held is None) == (at_last is None)
    assert held is None or (held.dtype == at_last.dtype and torch.equal(held, at_last))


def test_values_that_fit_are_written_in_place():
    fresh = Holder(torch.zeros(2))
    before = fresh.held
    assert torch.equal(back(Holder(torch.ones(2)), fresh).held, torch.ones(2))
    assert fresh.held is before


def test_a_buffer_that_is_registered_in_the_first_forward_pass_comes_back():
    ended = Holder()
    ended.layer.register_buffer("late", torch.ones(2))
    assert torch.equal(back(ended, Holder()).layer.late, torch.ones(2))


def test_names_share_a_tensor_as_they_did():
    """Also where the new model shares it otherwise."""

    def two(first, second):
        model = Holder(first)
        model.register_buffer("other", second)
        return model

    one, ones, twos = torch.zeros(2), torch.ones(2), torch.full((2,), 2.0)
    apart = back(two(ones, twos), two(one, one))
    assert torch.equal(apart.held, ones)
    assert torch.equal(apart.other, twos)
    together = back(two(ones, ones), two(torch.zeros(2), torch.zeros(2)))
    assert together.held is together.other
    assert torch.equal(together.held, ones)


@pytest.mark.parametrize("kind", ["fixed", "elastic"])
def test_a_run_whose_buffers_grow_can_be_resumed(lab, kind):
    def train(exchange, until):
        net = lab.fill(Holder())
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        with DiLoCo(
            net, inner, exchange, sync_every=1, buffers="none", save_inner_every=1
        ) as outer:
            began = None if net.held is None else net.held.clone()
            while outer.committed < until:
                net.held = torch.full((outer.inner_steps + 1,), float(exchange.rank))
                lab.push(net, inner, exchange.rank, outer.inner_steps)
        return began

    uri = f"memory://own-buffers/grown-{kind}"
    assert lab.run(lambda e: train(e, 2), exchanges(kind, uri, False)) == [None, None]
    second = lab.run(lambda e: train(e, 3), exchanges(kind, uri, True))
    assert same(second, [torch.full((2,), float(rank)) for rank in range(2)])


def test_a_buffer_that_cannot_be_saved_is_named_when_the_block_is_entered(lab):
    (exchange,) = [StoreExchange(open_store("memory://own-buffers/sparse"), 0, 1)]
    net = Holder(torch.eye(3).to_sparse())
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    refused = r"buffer 'held' belongs to this rank alone .* not a plain, dense tensor .*sparse_coo"
    with (
        pytest.raises(ConfigurationError, match=refused),
        DiLoCo(net, inner, exchange, sync_every=1, buffers="none"),
    ):
        pass


def test_other_buffers_are_refused():
    plain, more = nn.Linear(3, 2), nn.Sequential(Holder(torch.ones(2)))
    with pytest.raises(ValueError, match=r"buffer '0\.held' was saved, but the model has no such"):
        back(more, plain)
    with pytest.raises(ValueError, match=r"has a buffer '0\.held', which was not saved"):
        back(plain, more)
