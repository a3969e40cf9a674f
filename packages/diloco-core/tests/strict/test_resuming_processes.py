"""Real processes of a strict run are killed, and others continue the run."""

import hashlib
import sys
import time

import pytest
import torch
from training_lab import PATIENCE
from warm_processes import WarmProcess

from diloco_core import DiLoCo, connect

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SYNCS = 30
"""More than are taken before the processes are killed, so that there is something left to do."""


class Batches:
    """How many a replica has taken."""

    def __init__(self):
        self.number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def train(uri, rank, resume):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Linear(20, 5)
    # Without a state, since the processes may be killed after a sync and before they have saved what belongs to it.
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    batches = Batches()
    # Long enough for a busy machine; so it is the time for which the second processes wait.
    exchange = connect(uri, rank=rank, world_size=2, resume=resume, lost_after=60.0)
    saving = {"stateful": {"batches": batches}, "save_inner_every": 1}
    with DiLoCo(net, inner, exchange, sync_every=2, **saving) as outer:
        assert (outer.committed > 0) == resume
        assert outer.inner_steps == batches.number + outer.batches_to_skip
        batches.number += outer.batches_to_skip
        while outer.committed < SYNCS:
            generator = torch.Generator().manual_seed(1000 * rank + batches.number)
            batches.number += 1
            net(torch.randn(8, 20, generator=generator)).pow(2).mean().backward()
            inner.step()
            inner.zero_grad()
            time.sleep(0.02)
    held = b"".join(parameter.detach().numpy().tobytes() for parameter in net.parameters())
    digest = hashlib.sha256(held).hexdigest()
    sys.stdout.write(f"{outer.inner_steps} {batches.number} {digest}\n")


def start(folder, name, resume=False):
    return [
        WarmProcess(folder / f"{name}{rank}", train, str(folder / "run"), rank, resume)
        for rank in range(2)
    ]


def ends_of(processes):
    ends = [process.communicate() for process in processes]
    assert [status for status, _, _ in ends] == [0, 0], ends
    return [out for _, out, _ in ends]


@pytest.mark.parametrize("killed", [[0, 1], [1]], ids=["both", "one"])
def test_it_ends_as_a_run_that_was_not_disturbed(tmp_path, killed):
    whole = tmp_path / "whole"
    whole.mkdir()
    wanted = ends_of(start(whole, "whole"))
    processes = start(tmp_path, "first")
    deadline = time.monotonic() + PATIENCE
    while not (tmp_path / "run" / "state" / "00000005").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for rank in killed:
        processes[rank].kill()
    for process in processes:
        status, _, err = process.communicate()
        assert status != 0
        assert status < 0 or "rank 1 has shown no sign of life" in err
    assert ends_of(start(tmp_path, "second", resume=True)) == wanted
