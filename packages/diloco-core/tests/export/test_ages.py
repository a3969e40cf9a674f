"""How old an exported state is: gather runs publish theirs only after some of their syncs."""

import logging
import re

import pytest
import torch
from safetensors import safe_open
from torch import nn

from diloco_core import DiLoCo, Elastic, RendezvousError, StoreExchange, export
from diloco_core._store._open import open_store


def model():
    return nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))


def exported(folder, syncs, visit, fragments=4):
    """Run one replica, and visit after each sync what the store then holds."""
    elastic = Elastic(1, topology="gather", publish_every=2)
    exchange = StoreExchange(open_store(str(folder)), 0, 1, elastic)
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=1e-6)
    with DiLoCo(net, inner, exchange, sync_every=fragments, fragments=fragments) as outer:
        while outer.committed < syncs:
            before = outer.committed
            inner.zero_grad()
            net(torch.ones(1, 2)).sum().backward()
            inner.step()
            if outer.committed > before:
                visit(outer.committed)
    return outer.committed


def test_it_says_how_old_it_is(tmp_path, caplog):
    ages = {}

    def visit(committed):
        if committed not in {7, 16, 18}:
            return
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            step = export(tmp_path / "run", tmp_path / "model.safetensors")
        ages[committed] = committed - step
        said = caplog.text
        assert bool(said) == (committed > step)
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            assert int((file.metadata() or {}).get("behind", 0)) == committed - step
        if step == 0:
            assert "when the run began (outer step 0), and nothing that was trained" in said
            assert f"{committed} outer steps were taken since" in said
        elif step < committed:
            assert f"the state after outer step {step}, and the run has taken" in said

    last = exported(tmp_path / "run", 20, visit)
    assert max(ages.values()) > 8
    caplog.clear()
    assert export(tmp_path / "run", tmp_path / "model.safetensors") == last
    assert caplog.text == "", "a run that has ended has published its state"


def test_the_newest_two_states_of_the_whole_model_are_kept(tmp_path):
    counts = []

    def visit(committed):
        if committed < 8:
            return
        with pytest.raises(RendezvousError) as caught:
            export(tmp_path / "run", tmp_path / "model.safetensors", at=9999)
        counts.append(len(re.findall(r"\d+", str(caught.value).partition("after outer steps")[2])))

    exported(tmp_path / "run", 16, visit, fragments=2)
    assert min(counts) >= 2
