"""Training with outer parameter groups."""

import torch

from diloco_core import DiLoCo

SIZES = (5, 3, 8, 1)


def gradient(rank, step, number):
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
    whole = torch.randint(-8, 9, (SIZES[number],), generator=generator)
    return whole.double() / 16


def a_model():
    return torch.nn.ParameterList([torch.zeros(size, dtype=torch.float64) for size in SIZES])


def groups_of(model, members, settings):
    """The groups, given the number of the group of every parameter."""
    return [
        {"params": [p for p, member in zip(model, members, strict=True) if member == number], **own}
        for number, own in enumerate(settings)
    ]


def train(exchange, members, settings, fragments, steps, **options):
    model, reports = a_model(), []
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options |= {"sync_every": 2 * fragments, "fragments": fragments, "flush": "none"}
    options |= {"outer_groups": groups_of(model, members, settings), "on_sync": reports.append}
    with DiLoCo(model, inner, exchange, **options) as outer:
        for step in range(steps):
            for number, parameter in enumerate(model):
                parameter.grad = gradient(exchange.rank, step, number)
            inner.step()
        copies = [part["copy"] for part in outer.state_dict()["fragments"]]
    held, numbers = [sum(map(len, part)) for part in copies], iter(range(len(SIZES)))
    parts = []  # the numbers of the parameters in each fragment, which are in order
    for size in held:
        part = []
        while sum(SIZES[number] for number in part) < size:
            part.append(next(numbers))
        parts.append(part)
    values = [copy for part in copies for copy in part]
    return [parameter.detach().clone() for parameter in model], reports, parts, values
