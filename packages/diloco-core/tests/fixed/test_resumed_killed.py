"""Whoever resumes a run after a process was killed waits for the signs of life of that process only
where it may be alive.
"""

import os
import signal

import pytest
import torch
from strict_lab import STORES
from training_lab import PATIENCE, Clock, push, small_model
from warm_processes import WarmProcess

from diloco_core import DiLoCo, StoreExchange, Timing

pytestmark = pytest.mark.processes


def train(store, until, timing=None, resume=False):
    exchange = StoreExchange(store, 0, 1, timing=timing, resume=resume)
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, inner, exchange, sync_every=1, flush="none") as outer:
        while outer.committed < until:
            push(model, inner, 0, outer.inner_steps)
    return outer.committed


def killed(kind, folder):
    """A process that takes two syncs and is killed inside the block of a third one."""
    exchange = StoreExchange(STORES[kind](folder), 0, 1)
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, inner, exchange, sync_every=1):
        for step in range(3):
            push(model, inner, 0, step)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("kind", "elsewhere"), [("overwriting", False), ("overwriting", True), ("deciding", True)]
)
def test_who_is_waited_for_after_a_kill(tmp_path, caplog, monkeypatch, kind, elsewhere):
    folder = str(tmp_path / "run")
    status, _, _ = WarmProcess(tmp_path / "out", killed, kind, folder).communicate()
    assert status == -signal.SIGKILL
    if elsewhere:  # the same name of a machine, another one: containers may have the same
        monkeypatch.setattr("diloco_core._host.host_id", lambda: "another")
    clock = Clock()
    timing = Timing(lost_after=PATIENCE, clock=clock, sleep=clock.sleep)
    assert train(STORES[kind](folder), 5, timing, resume=True) == 5
    waited = elsewhere and kind == "overwriting"
    assert (clock.now > PATIENCE) is waited
    assert ("their signs of life are watched" in caplog.text) is waited
