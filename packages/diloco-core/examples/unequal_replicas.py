"""Two replicas, one four times as fast: each takes as many inner steps as fit in the same time.

The replicas are threads here, as in ``plain_loop.py``, and sleep in place of long steps. In
practice they are different machines.
"""

import sys
import tempfile
import time

import torch

from diloco_core import DiLoCo, Seconds, connect
from diloco_core.testing import run_replicas

OUTER_STEPS = 4
STEP_SECONDS = [0.01, 0.04]


def train(exchange):
    """Train one replica until the run has taken its outer steps."""
    generator = torch.Generator().manual_seed(exchange.rank)
    wanted = torch.linspace(-1, 1, 16)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    reports = []
    options = {"sync_every": Seconds(0.4), "flush": "none", "on_sync": reports.append}
    with DiLoCo(model, optimizer, exchange, **options) as outer:
        while outer.committed < OUTER_STEPS:
            time.sleep(STEP_SECONDS[exchange.rank])
            x = torch.randn(32, 16, generator=generator)
            torch.nn.functional.mse_loss(model(x), x @ wanted[:, None]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return sum(report.inner_steps for report in reports), model.state_dict()


def main():
    """Train, and say how many steps each replica has contributed."""
    with tempfile.TemporaryDirectory() as folder:
        ends = run_replicas(
            train,
            [
                connect(f"{folder}/run", rank=rank, world_size=2, min_replicas=2)
                for rank in range(2)
            ],
        )
        for end in ends:
            if isinstance(end, BaseException):
                raise end
    for rank, (steps, _) in enumerate(ends):
        sys.stdout.write(f"rank {rank} contributed {steps} inner steps to {OUTER_STEPS} syncs\n")
    assert all(torch.equal(ends[0][1][name], ends[1][1][name]) for name in ends[0][1])
    sys.stdout.write("both replicas hold the same model\n")


if __name__ == "__main__":
    main()
