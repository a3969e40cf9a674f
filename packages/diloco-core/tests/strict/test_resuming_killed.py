"""Whoever resumes a run does not watch for the signs of life of a process that is known to be dead on this machine."""

import os
import signal

import pytest
import torch
from training_lab import PATIENCE, Clock, push, small_model
from warm_processes import WarmProcess

from diloco_core import DiLoCo, Timing, connect

pytestmark = pytest.mark.processes


def train(folder, until, timing=None, resume=False):
    exchange = connect(folder, rank=0, world_size=1, resume=resume, timing=timing)
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, inner, exchange, sync_every=1, flush="none") as outer:
        while outer.committed < until:
            push(model, inner, 0, outer.inner_steps)
    return outer.committed


def killed(folder):
    """A process that takes two syncs and is killed inside the block of a third one."""
    exchange = connect(folder, rank=0, world_size=1)
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, inner, exchange, sync_every=1):
        for step in range(3):
            push(model, inner, 0, step)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_process_that_was_killed_here_is_not_waited_for(tmp_path, caplog, monkeypatch, elsewhere):
    status, _, _ = WarmProcess(tmp_path / "out", killed, str(tmp_path / "run")).communicate()
    assert status == -signal.SIGKILL
    if elsewhere:  # the same name of a machine, another one: containers may have the same
        monkeypatch.setattr("diloco_core._host.host_id", lambda: "another")
    clock = Clock()
    timing = Timing(lost_after=PATIENCE, clock=clock, sleep=clock.sleep)
    assert train(str(tmp_path / "run"), 5, timing, resume=True) == 5
    assert (clock.now > PATIENCE) is elsewhere
    assert ("their signs of life are watched" in caplog.text) is elsewhere
