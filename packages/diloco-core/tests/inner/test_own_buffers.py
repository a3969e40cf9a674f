"""With ``buffers="none"`` each rank has its own, and its next incarnation gets them back."""

import itertools

import pytest
import torch
from loop_lab import exchanges, loop
from torch import nn

from diloco_core import ConfigurationError

OWN = {"buffers": "none", "sync_every": 1, "save_inner_every": 1}
KINDS = pytest.mark.parametrize("kind", ["store", "elastic"])
_places = itertools.count()


def again(kind, count, place, resume):
    return exchanges(kind, count, place, resume=resume and kind == "store")


def incarnation(lab, exchange, until, **options):
    net = lab.fill(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    _, _, outer, _ = loop(exchange, net, inner, **{**OWN, **options})
    with outer:
        began = [buffer.clone() for buffer in net.buffers()]
        while outer.committed < until:
            net(torch.ones(5, 3) * (exchange.rank + 1)).sum().backward()
            lab.push(net, inner, exchange.rank, outer.inner_steps)
    return began, [buffer.clone() for buffer in net.buffers()]


@pytest.mark.sampled
@KINDS
@pytest.mark.parametrize("policy", ["none", "mean"])
def test_buffers_that_were_never_saved_are_spoken_of(lab, tmp_path, caplog, kind, policy):
    caplog.set_level("INFO", logger="diloco_core")
    options = {"buffers": policy, "save_inner_every": 0}
    for until, resume in (2, False), (3, True):
        caplog.clear()
        lab.run(
            lambda each, until=until: incarnation(lab, each, until, **options),
            again(kind, 2, tmp_path, resume),
        )
    records = [record for record in caplog.records if "fresh inner state" in record.getMessage()]
    assert {record.levelname for record in records} == {"WARNING" if policy == "none" else "INFO"}
    assert all("with save_inner_every=0" in record.getMessage() for record in records)
    assert ("the buffers (buffers='none')" in caplog.text) is (policy == "none")


@KINDS
def test_they_come_back(lab, tmp_path, kind):
    first, second = (
        lab.run(
            lambda each, until=until: incarnation(lab, each, until),
            again(kind, 2, tmp_path, until > 2),
        )
        for until in (2, 3)
    )
    for (_, ended), (began, _) in zip(first, second, strict=True):
        assert all(map(torch.equal, ended, began))
    assert not all(map(torch.equal, first[0][1], first[1][1]))


class Holder(nn.Module):
    """A model with some buffers beside its parameters."""

    def __init__(self, **buffers):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


def back(lab, ended, fresh, kind="store"):
    """Return what a new model holds after it has taken the buffers of one that has ended."""
    place = f"memory://own/{next(_places)}"
    for model in (ended, fresh):
        (exchange,) = again(kind, 1, place, model is fresh)
        _, inner, outer, _ = loop(exchange, lab.fill(model), **OWN)
        with outer:
            held = {name: each.clone() for name, each in model.named_buffers()}
            lab.push(model, inner, 0, 0)
    return held


REBUILT = {
    "None at first": (None, torch.arange(3.0)),
    "grown": (torch.zeros(0), torch.arange(3.0)),
    "another dtype": (torch.zeros(2), torch.ones(2, dtype=torch.int64)),
    "expanded": (torch.zeros(()).expand(4), torch.ones(()).expand(4)),
    "expanded at first": (torch.zeros(1).expand(3, 2), torch.arange(6.0).view(3, 2)),
    "overlapping": (torch.zeros(4).as_strided((2, 3), (1, 1)), torch.arange(6.0).view(2, 3)),
    "None at last": (torch.ones(2), None),
    "transposed": (torch.zeros(3, 2).t(), torch.arange(6.0).view(3, 2).t()),
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", REBUILT)
@KINDS
def test_what_modules_have_assigned_comes_back(lab, case, kind):
    at_first, at_last = REBUILT[case]
    held = back(lab, Holder(held=at_last), Holder(held=at_first), kind)
    assert held.keys() == (set() if at_last is None else {"held"})
    if at_last is not None:
        assert held["held"].dtype == at_last.dtype
        assert torch.equal(held["held"], at_last)


def test_what_is_registered_later_comes_back_and_what_fits_is_written_in_place(lab):
    ended, fresh = Holder(held=torch.ones(2)), Holder(held=torch.zeros(2))
    ended.layer.register_buffer("late", torch.ones(2))
    before = fresh.held
    assert torch.equal(back(lab, ended, fresh)["layer.late"], torch.ones(2))
    assert torch.equal(fresh.held, torch.ones(2))
    assert fresh.held is before


def test_names_share_a_tensor_as_they_did(lab):
    """Also where the new model shares it otherwise."""
    one, ones, twos = torch.zeros(2), torch.ones(2), torch.full((2,), 2.0)
    apart = Holder(held=one, other=one)
    back(lab, Holder(held=ones, other=twos), apart)
    assert torch.equal(apart.held, ones)
    assert torch.equal(apart.other, twos)
    together = Holder(held=torch.zeros(2), other=torch.zeros(2))
    back(lab, Holder(held=ones, other=ones), together)
    assert together.held is together.other
    assert torch.equal(together.held, ones)


def test_a_buffer_that_cannot_be_saved_is_named_when_the_block_is_entered():
    outer = loop(*exchanges("store", 1), Holder(held=torch.eye(3).to_sparse()), **OWN)[2]
    refused = r"buffer 'held' belongs to this rank alone .* not a plain, dense tensor .*sparse_coo"
    with pytest.raises(ConfigurationError, match=refused):
        outer.__enter__()


def test_other_buffers_are_refused(lab):
    with pytest.raises(ConfigurationError, match="buffer 'held', which was not saved"):
        back(lab, Holder(other=torch.ones(2)), Holder(held=torch.ones(2), other=torch.ones(2)))
    more, less = Holder(other=torch.ones(2)), Holder(other=torch.ones(2))
    more.part = nn.BatchNorm1d(2, affine=False)
    text = r"buffer 'part\.\w+' was saved, but the model has no such"
    with pytest.raises(ConfigurationError, match=text):
        back(lab, more, less)
