"""A torch loop with DiLoCo: three replicas, each with a third of the data, meet in a folder.

Here a replica is a thread, so that one command shows everything. On machines of their own, each
calls ``train(connect())`` instead, and finds ``RENDEZVOUS_URI``, ``REPLICA_RANK`` and
``REPLICA_WORLD_SIZE`` in its environment. Nothing else changes.
"""

import sys
import tempfile

import torch

from diloco_core import DiLoCo, connect
from diloco_core.testing import run_replicas

REPLICAS = 3
STEPS = 60


def data_of(rank):
    """This replica's batches; every rank has others."""
    generator = torch.Generator().manual_seed(rank)
    wanted = torch.linspace(-1, 1, 16)
    for _ in range(STEPS):
        x = torch.randn(32, 16, generator=generator)
        yield x, x @ wanted[:, None]


def train(exchange):
    """Train one replica; what it has learned."""
    model = torch.nn.Linear(16, 1)  # rank 0's initial values are taken by all
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with DiLoCo(model, optimizer, exchange, sync_every=20) as outer:
        for x, y in data_of(exchange.rank):
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()  # after every 20th, the replicas sync
            optimizer.zero_grad()
    return outer.committed, loss.item(), model.weight.detach()


def main():
    """Train, and see that all replicas end with the same model."""
    with tempfile.TemporaryDirectory() as folder:
        exchanges = [
            connect(f"{folder}/run", rank=rank, world_size=REPLICAS) for rank in range(REPLICAS)
        ]
        ends = run_replicas(train, exchanges)
    for rank, end in enumerate(ends):
        if isinstance(end, BaseException):
            raise end
        committed, loss, _ = end
        sys.stdout.write(f"rank {rank}: {committed} outer steps, last loss {loss:.3f}\n")
    first = ends[0][2]
    assert all(torch.equal(first, weight) for _, _, weight in ends)
    sys.stdout.write("all replicas hold the same model, to the last bit\n")


if __name__ == "__main__":
    main()
