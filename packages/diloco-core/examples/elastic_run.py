"""An elastic run: one of three replicas fails, is started again, and the run does not mind.

The replicas are threads here, as in ``plain_loop.py``. In practice the failure is a machine that
is taken away, and whoever launched the replica (Kubernetes, say) starts it again.
"""

import sys
import tempfile

import torch
from safetensors.torch import load_file

from diloco_core import DiLoCo, connect, export
from diloco_core.testing import run_replicas

REPLICAS = 3
OUTER_STEPS = 8


class MachineIsGoneError(Exception):
    """What happens to rank 2 in its first incarnation."""


def batch(rank, number):
    """One batch of this rank's data.

    It depends on its number alone, so no incarnation of the rank takes another one's batches.
    """
    generator = torch.Generator().manual_seed(1_000_000 * rank + number)
    wanted = torch.linspace(-1, 1, 16)
    x = torch.randn(32, 16, generator=generator)
    return x, x @ wanted[:, None]


def train(exchange, fails_after=None):
    """Train one replica until the run has taken its outer steps."""
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with DiLoCo(model, optimizer, exchange, sync_every=10, flush="none") as outer:
        began_at = outer.inner_steps  # 0 unless this rank has lived before
        while outer.committed < OUTER_STEPS:  # the run's steps, whoever took them
            # A loader with a position of its own belongs in stateful= instead (docs/membership.md).
            x, y = batch(exchange.rank, outer.inner_steps)
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if outer.committed == fails_after:
                raise MachineIsGoneError
    return began_at, model.state_dict()


def join(folder, rank):
    """Connect one rank. With ``min_replicas`` the run is elastic: a sync needs two of the three."""
    return connect(f"{folder}/run", rank=rank, world_size=REPLICAS, min_replicas=2, grace=30)


def with_a_second_incarnation(folder):
    """What a replica does, and what its launcher does when it fails."""

    def replica(exchange):
        if exchange.rank != 2:
            return train(exchange)
        try:
            return train(exchange, fails_after=3)
        except MachineIsGoneError as error:
            exchange.abort(error)  # where a process ends, the others see that by its silence
        return train(join(folder, rank=2))

    return replica


def main():
    """Train, lose a replica, get it back, and take the model out of the store."""
    with tempfile.TemporaryDirectory() as folder:
        exchanges = [join(folder, rank) for rank in range(REPLICAS)]
        ends = run_replicas(with_a_second_incarnation(folder), exchanges)
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        export(f"{folder}/run", f"{folder}/model.safetensors")
        model = load_file(f"{folder}/model.safetensors")
    sys.stdout.write(f"rank 2 came back, and went on with its batch number {ends[2][0]}\n")
    for _, state in ends:
        assert all(torch.equal(state[name], model[name]) for name in model)
    sys.stdout.write("all replicas hold the model that the store holds\n")


if __name__ == "__main__":
    main()
