"""Real processes of a fixed run are killed, and others continue the run."""

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


def train(uri, rank, again, resume):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Linear(20, 5)
    # Without a state, since the processes may be killed after a sync and before they have saved
    # what belongs to it.
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    batches = Batches()
    # Long enough for a busy machine.
    exchange = connect(uri, rank=rank, world_size=2, resume=resume, lost_after=PATIENCE)
    saving = {"stateful": {"batches": batches}, "save_inner_every": 1}
    with DiLoCo(net, inner, exchange, sync_every=2, **saving) as outer:
        assert (outer.committed > 0) == again
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


def start(folder, name, ranks=(0, 1), *, again=False, resume=False):
    return [
        WarmProcess(folder / f"{name}{rank}", train, str(folder / "run"), rank, again, resume)
        for rank in ranks
    ]


def ends_of(processes):
    """What they came to, and what they have said."""
    ends = [process.communicate() for process in processes]
    assert [status for status, _, _ in ends] == [0, 0], ends
    return [out for _, out, _ in ends], "".join(err for _, _, err in ends)


@pytest.mark.parametrize("resume", [True, False], ids=["both", "one"])
def test_it_ends_as_a_run_that_was_not_disturbed(tmp_path, resume):
    """All ranks are killed and the run is resumed; or one rank, which is started again while the
    other one waits for it.
    """
    whole = tmp_path / "whole"
    whole.mkdir()
    wanted, _ = ends_of(start(whole, "whole"))
    processes = start(tmp_path, "first")
    deadline = time.monotonic() + PATIENCE
    while not (tmp_path / "run" / "state" / "00000005").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed = processes if resume else processes[1:]
    for process in killed:
        process.kill()
    for process in killed:
        status, _, _ = process.communicate()
        assert status < 0
    ranks = (0, 1) if resume else (1,)
    second = start(tmp_path, "second", ranks, again=True, resume=resume)
    ends, said = ends_of(second if resume else [processes[0], *second])
    held = [end.split() for end in ends]
    assert held[0][2] == held[1][2]
    # What a process had kept of its own contribution when it was killed is lost with it.
    assert ends == wanted or "counts as nothing" in said
