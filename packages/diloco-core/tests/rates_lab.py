"""A small outer loop that is not trained, for tests of the outer learning rate."""

import torch
from torch import nn

from diloco_core import DiLoCo, in_process


def loop(exchange=None, **options):
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = exchange or in_process(1)[0]
    return model, inner, DiLoCo(model, inner, exchange, **{"sync_every": 1, **options})
