"""A model with a bit of everything, and outer loops around it."""

import torch
from torch import nn

from diloco_core import DiLoCo, in_process


class Net(nn.Module):
    """A frozen layer, two trainable ones, and buffers of both kinds."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(3, 3).requires_grad_(False)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.arange(4.0), persistent=False)


def make(lab, exchange=None, model=None, optimizer=None, **options):
    model = lab.fill(Net()) if model is None else model
    inner = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    outer = DiLoCo(model, inner, exchange or in_process(1)[0], **{"sync_every": 1, **options})
    return model, inner, outer
