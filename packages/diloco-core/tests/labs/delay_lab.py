"""A small problem with a delay, by the formulas and by the outer loop."""

import torch
from torch import nn

from diloco_core import DiLoCo

SIZE = 6  # values in a fragment


class Parts(nn.Module):
    """One parameter per fragment, in float64."""

    def __init__(self, fragments):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.parts = nn.ModuleList()
        for _ in range(fragments):
            part = nn.Module()
            start = torch.randn(SIZE, generator=generator, dtype=torch.float64)
            part.weight = nn.Parameter(start)
            self.parts.append(part)

    @property
    def weights(self):
        return [part.weight for part in self.parts]


def target(rank, fragment):
    generator = torch.Generator().manual_seed(100 * rank + fragment)
    return torch.randn(SIZE, generator=generator, dtype=torch.float64)


def set_gradients(weights, rank):
    for fragment, weight in enumerate(weights):
        weight.grad = 2.0 * (weight.detach() - target(rank, fragment))


INNER = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.03),
}
OUTER = {
    "averaging": {"outer_lr": 1.0, "outer_momentum": 0.0},
    "Nesterov": {"outer_lr": 0.7, "outer_momentum": 0.9},
    "heavy ball": {"outer_lr": 0.4, "outer_momentum": 0.8, "nesterov": False},
}


def by_the_formulas(
    replicas, fragments, period, delay, alpha, inner, outer, steps, refused=(), lr_of=None
):
    """Return what all parameters are after every step and at the end, and the committed syncs.

    The outer learning rate is that of ``OUTER``, or ``lr_of(sync, taken)`` with the inner steps
    taken when the sync is sent.
    """
    models = [Parts(fragments) for _ in range(replicas)]
    inners = [INNER[inner](model.parameters()) for model in models]
    copies = [weight.detach().clone() for weight in Parts(fragments).weights]
    buffers = [None] * fragments
    lr, momentum = OUTER[outer]["outer_lr"], OUTER[outer]["outer_momentum"]
    since_sync = [0] * fragments
    k = committed = attempts = 0
    sent = None

    def send(taken):
        nonlocal lr
        fragment = committed % fragments
        lr = lr_of(committed + 1, taken) if lr_of else lr
        return [copies[fragment] - model.weights[fragment].detach() for model in models]

    def apply(sent):
        nonlocal committed, attempts
        fragment = committed % fragments
        counts = attempts not in refused
        attempts += 1
        if counts:
            gradient = sum(sent[1:], sent[0]) / replicas
            first = buffers[fragment] is None
            buffer = gradient if first else momentum * buffers[fragment] + gradient
            buffers[fragment] = buffer
            direction = (
                gradient + momentum * buffer if OUTER[outer].get("nesterov", True) else buffer
            )
            copies[fragment] = copies[fragment] - lr * direction
            committed += 1
        for model in models:
            weight = model.weights[fragment]
            mixed = torch.lerp(copies[fragment], weight.detach(), alpha if counts else 0.0)
            weight.data.copy_(mixed)
        since_sync[fragment] = 0
        return counts

    seen = [[] for _ in models]
    for step in range(steps):
        for rank, model in enumerate(models):
            set_gradients(model.weights, rank)
            inners[rank].step()
        since_sync[:] = [count + 1 for count in since_sync]
        k += 1
        if k == period - delay:
            sent = send(step + 1)
        if k == period:
            apply(sent)
            sent, k = None, 0
        for rank, model in enumerate(models):
            seen[rank].append([weight.detach().clone() for weight in model.weights])
    if sent is not None:
        apply(sent)
    for _ in range(fragments):
        if not any(since_sync) or not apply(send(steps)):
            break
    for run in seen:
        run.append([copy.clone() for copy in copies])
    return seen, committed


def train(exchange, fragments, period, delay, alpha, inner, outer, steps, wishes=None, **more):
    """The same by the outer loop; ``wishes`` are outer learning rates by (rank, step)."""
    model = Parts(fragments)
    optimizer = INNER[inner](model.parameters())
    seen, reports = [], []
    options = {"sync_every": fragments * period, "fragments": list(model.parts), "delay": delay}
    options |= {"alpha": alpha, "on_sync": reports.append, **OUTER[outer], **more}
    with DiLoCo(model, optimizer, exchange, **options) as loop:
        for step in range(steps):
            if (exchange.rank, step) in (wishes or {}):
                loop.set_outer_lr(wishes[exchange.rank, step])
            set_gradients(model.weights, exchange.rank)
            optimizer.step()
            seen.append([weight.detach().clone() for weight in model.weights])
    seen.append([weight.detach().clone() for weight in model.weights])
    return seen, loop.committed, reports
