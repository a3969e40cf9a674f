"""An elastic run: one of three replicas fails, is started again, and the run does not mind.

The replicas are threads here, as in ``plain_loop.py``. In life the failure is a machine that is taken away, and whoever
launched the replica (Kubernetes, say) starts it again.
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
    """What happens to rank 2 in its first life."""


def batches(rank):
    """This rank's data, from its beginning, without end."""
    generator = torch.Generator().manual_seed(rank)
    wanted = torch.linspace(-1, 1, 16)
    while True:
        x = torch.randn(32, 16, generator=generator)
        yield x, x @ wanted[:, None]


def train(exchange, fails_after=None):
    """Train one replica until the run has taken its outer steps."""
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = batches(exchange.rank)
    with DiLoCo(model, optimizer, exchange, sync_every=10, flush="none") as outer:
        skipped = outer.batches_to_skip  # 0 unless this rank has lived before
        for _ in range(skipped):
            next(loader)
        while outer.committed < OUTER_STEPS:  # the run's steps, whoever took them
            x, y = next(loader)
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if outer.committed == fails_after:
                raise MachineIsGoneError
    return skipped, model.state_dict()


def join(folder, rank):
    """Connect one rank. With ``min_replicas`` the run is elastic: a sync needs two of the three."""
    return connect(f"{folder}/run", rank=rank, world_size=REPLICAS, min_replicas=2, grace=30)


def with_a_second_life(folder):
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
        ends = run_replicas(with_a_second_life(folder), exchanges)
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        export(f"{folder}/run", f"{folder}/model.safetensors")
        model = load_file(f"{folder}/model.safetensors")
    skipped = ends[2][0]
    sys.stdout.write(
        f"rank 2 came back, and passed over {skipped} batches that the run has already\n"
    )
    for _, state in ends:
        assert all(torch.equal(state[name], model[name]) for name in model)
    sys.stdout.write("all replicas hold the model that the store holds\n")


if __name__ == "__main__":
    main()
