"""What a row's model has learned in the end: its loss on text that no replica has trained on.

Losses do not depend on time, so replicas are threads of one process here, and take their inner
steps one after another: a run needs one core, and every run of a row and seed gives the same loss.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from diloco_core import DiLoCo, in_process
from diloco_core.testing import run_replicas

from .language_model import LanguageModel
from .text import windows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco_core import Exchange

    from .rows import Row
    from .text import Text


@dataclass(frozen=True, slots=True)
class Training:
    """How long and how is trained, in every row.

    Attributes:
        replicas: k.
        steps: Inner steps of every replica.
        sync_every: H.
        batch: Windows in the batch of a replica.
        context: Bytes of a window.
        width: Of the model.
        layers: Of the model.
        lr: The largest learning rate of the inner AdamW: it rises for a tenth of the steps, then
            falls to a tenth as a cosine.
        validation: Windows on which the loss is measured.
    """

    replicas: int = 4
    steps: int = 800
    sync_every: int = 32
    batch: int = 8
    context: int = 64
    width: int = 128
    layers: int = 2
    lr: float = 1e-3
    validation: int = 2048

    def lr_at(self, step: int) -> float:
        """The inner learning rate of a step."""
        rising = self.steps / 10
        if step < rising:
            return self.lr * (step + 1) / rising
        share = (step - rising) / (self.steps - rising)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


def loss_of(row: Row, seed: int, text: Text, training: Training) -> float:
    """Train as a row says, and measure.

    Args:
        row: How it is trained.
        seed: Decides the initial values and the batches; these are the same in every row, except
            for those of one replica alone.
        text: What is learned; it has a part for every replica.
        training: How long is trained.

    Returns:
        The loss on the validation's text, in nats per byte.
    """
    torch.set_num_threads(1)
    train = _diloco if row.kind == "diloco" else _at_once
    return _validate(train(row, seed, text, training), text, training)


def parameters_of(training: Training) -> int:
    """How many parameters the model has."""
    return sum(parameter.numel() for parameter in _model(0, training).parameters())


def _diloco(row: Row, seed: int, text: Text, training: Training) -> LanguageModel:
    turn = threading.Lock()  # one core, whatever the machine has
    models = {rank: _model(seed, training) for rank in range(training.replicas)}

    def train(exchange: Exchange) -> None:
        torch.set_num_threads(1)
        model, batches = models[exchange.rank], _batches(exchange.rank, seed, text, training)
        optimizer = _optimizer(model)
        with DiLoCo(model, optimizer, exchange, **row.options(training.sync_every)):
            for step in range(training.steps):
                with turn:
                    model.loss(next(batches)).backward()
                _step(optimizer, training.lr_at(step))

    for result in run_replicas(train, in_process(training.replicas), timeout=7200):
        if isinstance(result, BaseException):
            raise result
    return models[0]


def _at_once(row: Row, seed: int, text: Text, training: Training) -> LanguageModel:
    """Train one model whose batch is that of one replica, or those of all.

    With those of all, its gradient is the mean of theirs.
    """
    model = _model(seed, training)
    optimizer = _optimizer(model)
    batches = [_batches(rank, seed, text, training) for rank in range(training.replicas)]
    for step in range(training.steps):
        if row.kind == "synchronous":
            batch = torch.cat([next(each) for each in batches])
        else:  # one replica trains on all parts in turn
            batch = next(batches[step % training.replicas])
        model.loss(batch).backward()
        _step(optimizer, training.lr_at(step))
    return model


def _model(seed: int, training: Training) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(training.width, training.layers, training.context)


def _optimizer(model: LanguageModel) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), weight_decay=0.1, betas=(0.9, 0.95))


def _step(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()


def _batches(rank: int, seed: int, text: Text, training: Training) -> Iterator[torch.Tensor]:
    random = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        yield windows(text.parts[rank], training.batch, training.context, random)


@torch.no_grad()
def _validate(model: LanguageModel, text: Text, training: Training) -> float:
    random = torch.Generator().manual_seed(0)  # the same windows for every row and seed
    held_out = windows(text.validation, training.validation, training.context, random)
    parts = held_out.split(64)
    return sum(model.loss(part).item() * len(part) for part in parts) / len(held_out)
