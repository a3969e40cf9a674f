"""What replicas train: a small classifier whose parameters keep a ledger of learned batches."""

from __future__ import annotations

import torch

FEATURES = 32
CLASSES = 10
WIDTH = 128
LEDGER = 509
"""Elements of the ledger per rank; batch b is entered under ``b % LEDGER``."""


class Part(torch.nn.Module):
    """A layer with a ledger: element (rank, batch) grows by one when that rank learns that batch.

    The ledger takes part in the loss with a gradient of -1 at the batch's element. Under plain SGD
    with a learning rate of 1 it counts, and float64 keeps the counts exact, so every contribution
    tells which batches it was made from.
    """

    def __init__(self, inputs: int, outputs: int, world_size: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(inputs, outputs)
        self.ledger = torch.nn.Parameter(torch.zeros(world_size, LEDGER, dtype=torch.float64))


class Model(torch.nn.Module):
    """Two layers, and buffers of several kinds, with the same initial values everywhere."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Part(FEATURES, WIDTH, world_size)
        self.second = Part(WIDTH, CLASSES, world_size)
        self.register_buffer("scale", torch.ones(FEATURES))
        self.register_buffer("floor", torch.full((5,), -torch.inf))
        self.register_buffer("mask", torch.arange(7) % 2 == 0)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scores of the classes."""
        if self.training:
            with torch.no_grad():
                self.scale.mul_(0.99).add_(inputs.std(0), alpha=0.01)
                self.steps.add_(1)
        return self.second.linear(torch.relu(self.first.linear(inputs / 2)))

    def loss(
        self, rank: int, batch: int, inputs: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Cross entropy, and the entry of the batch in the ledgers."""
        entries = self.first.ledger[rank, batch % LEDGER] + self.second.ledger[rank, batch % LEDGER]
        return torch.nn.functional.cross_entropy(self(inputs), labels) - entries

    def optimizer(self) -> torch.optim.SGD:
        """Momentum for the weights, so that inner state exists; none for ledgers, which count."""
        ledgers = [self.first.ledger, self.second.ledger]
        weights = [*self.first.linear.parameters(), *self.second.linear.parameters()]
        return torch.optim.SGD(
            [
                {"params": weights, "lr": 0.02, "momentum": 0.9},
                {"params": ledgers, "lr": 1.0, "momentum": 0.0},
            ]
        )


class Batches:
    """Batches of a rank, each made from its number alone; a position to be saved."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.position = 0

    def __next__(self) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Number, inputs and labels of the next batch."""
        number = self.position
        self.position += 1
        return number, *examples(1_000_003 * (self._rank + 1) + number, 16)


def examples(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy points around ten centres, and which centre each belongs to."""
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return centres[labels] + 1.5 * torch.randn(count, FEATURES, generator=generator), labels
