"""An exchange of your own, over any transport that can gather values from all replicas.

:class:`Board` stands for the transport here: a place in memory where every replica puts its part
down, and takes everybody's when all are there. Everything that is special about an exchange is in
:class:`BoardExchange`.
"""

import sys
import threading

import torch

from diloco_core import DiLoCo, MismatchError, NonFiniteDeltaError, SyncReport
from diloco_core.testing import run_replicas


class Board:
    """Where replicas meet. Thread-safe."""

    def __init__(self, world_size):
        self.world_size = world_size
        self._changed = threading.Condition()
        self._parts = {}
        self._failed = None

    def everybodys(self, what, rank, part):
        """Put a part down, wait for all of them, and take them in rank order."""
        with self._changed:
            parts = self._parts.setdefault(what, {})
            parts[rank] = part
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: len(parts) == self.world_size or self._failed, timeout=600
            )
            if len(parts) < self.world_size:
                raise RuntimeError(f"rank {rank} waits for others in vain") from self._failed
            return [parts[other] for other in range(self.world_size)]

    def fail(self, error):
        """Nobody needs to wait any longer."""
        with self._changed:
            self._failed = error
            self._changed.notify_all()


class Sync:
    """A sync that was begun."""

    def __init__(self, exchange, job):
        self._exchange, self._job = exchange, job

    def finish(self):
        """Wait for the others, and adopt what comes out."""
        return self._exchange.finish(self._job)


class BoardExchange:
    """One replica's connection to the others, through a board.

    Every replica adds everything up by itself, in rank order: so all have the same bytes on
    processors that are alike. The exchanges of diloco_core give each replica a shard to update
    instead, and all read what it publishes: less work, and the same bytes on any processor.
    """

    def __init__(self, board, rank):
        self.rank = rank
        self.world_size = board.world_size
        self._board = board
        self._syncs = 0

    def join(self, schema):
        """Meet the others, and refuse models or settings that are not the same."""
        mine = (dict(schema.tensors), dict(schema.settings))
        for rank, other in enumerate(self._board.everybodys("join", self.rank, mine)):
            if other != mine:
                raise MismatchError(f"rank {rank} trains another model than rank {self.rank}")

    def shards(self, size):
        """Everything in one."""
        return 1

    def begin(self, job, *, last=False):
        """A sync has two halves.

        Here nothing can be done before all are there, so that the second half is all of it.
        """
        return Sync(self, job)

    def finish(self, job):
        """Contribute, add up, update, adopt; piece by piece."""
        number, sent, received = self._syncs, 0, 0
        for piece in job.layout.shard(0):
            group = job.layout.groups[piece.group]
            buffer = torch.empty(piece.numel, dtype=group.dtype)
            mine = job.contributed(piece, buffer).clone()  # the others read it while we go on
            if job.must_be_finite(piece) and not mine.isfinite().all():
                index = int((~mine.isfinite()).nonzero()[0])
                raise NonFiniteDeltaError(job.locate(piece, index), self.rank)
            parts = self._board.everybodys((number, piece), self.rank, mine)
            # "first" is for what has nothing to add up: rank 0's values, such as the model's
            # initial ones.
            reduced = parts[0].clone() if group.rule == "first" else sum(parts) / len(parts)
            values = job.update(piece, reduced)  # the outer optimizer's step
            job.check_update(piece, values, number)
            job.adopt(piece, values)
            sent += mine.nbytes
            received += sum(part.nbytes for part in parts) - mine.nbytes
        self._syncs += 1
        return SyncReport(
            sync=number,
            fragment=job.name,
            committed=True,
            members=self.world_size,
            bytes_sent=sent,
            bytes_received=received,
            wait_seconds=0.0,
            exchange_seconds=0.0,
        )

    def leave(self):
        """Nothing is left to be told."""

    def abort(self, error):
        """The others need not wait for this replica."""
        self._board.fail(error)


def train(exchange):
    """Train one replica; what it has learned."""
    data = torch.Generator().manual_seed(exchange.rank)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with DiLoCo(model, optimizer, exchange, sync_every=5) as outer:
        for _ in range(20):
            x = torch.randn(32, 16, generator=data)
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return outer.committed, model.weight.detach()


def main():
    """Train, and see that all replicas end with the same model."""
    board = Board(3)
    ends = run_replicas(train, [BoardExchange(board, rank) for rank in range(3)])
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    assert all(torch.equal(ends[0][1], weight) for _, weight in ends)
    sys.stdout.write(f"{ends[0][0]} outer steps, and all replicas hold the same model\n")


if __name__ == "__main__":
    main()
