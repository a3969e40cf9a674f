"""Convergence on real data.

scikit-learn's digits sorted by label and cut into one part per replica, so that no replica knows
all classes: the case in which the outer step has most to do.
"""

import functools

import pytest
import torch
from loop_lab import AVERAGING
from torch.nn import functional

from diloco_core import DiLoCo, in_process

REPLICAS, PERIOD, BATCH = 4, 10, 16
THRESHOLD = 0.60


@functools.cache
def digits():
    """1400 training images sorted by label, and 397 to validate."""
    # Not above: this takes long, and each worker of pytest reads this file.
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(data.target)[order]
    by_label = torch.argsort(labels[:1400], stable=True)
    return images[:1400][by_label], labels[:1400][by_label], images[1400:], labels[1400:]


class Net(torch.nn.Module):
    """An MLP 64-64-10 whose random start, torch's usual, does not depend on other threads."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = torch.nn.ParameterList()
        for width, height in ((64, 64), (64, 10)):
            bound = width**-0.5
            for shape in ((height, width), (height,)):
                self.layers.append(torch.empty(shape).uniform_(-bound, bound, generator=generator))

    def forward(self, images):
        hidden = functional.linear(images, self.layers[0], self.layers[1]).relu()
        return functional.linear(hidden, self.layers[2], self.layers[3])


def final_loss(lab, rounds, **options):
    """Validation loss of the global copy after all rounds, as the first replica holds it."""
    images, labels, valid_images, valid_labels = digits()
    part = len(images) // REPLICAS
    exchanges = in_process(REPLICAS)

    def replica(exchange):
        rank = exchanges.index(exchange)
        net = Net()
        inner = torch.optim.AdamW(net.parameters(), lr=2e-3)
        generator = torch.Generator().manual_seed(rank)
        own = slice(rank * part, (rank + 1) * part)
        own_images, own_labels = images[own], labels[own]
        with DiLoCo(net, inner, exchange, sync_every=PERIOD, **options) as outer:
            for _ in range(PERIOD * rounds):
                chosen = torch.randint(part, (BATCH,), generator=generator)
                functional.cross_entropy(net(own_images[chosen]), own_labels[chosen]).backward()
                inner.step()
                inner.zero_grad()
        return torch.cat([fragment["copy"][0] for fragment in outer.state_dict()["fragments"]])

    copies = lab.run(replica, exchanges)
    net = Net()
    torch.nn.utils.vector_to_parameters(copies[0], net.parameters())
    with torch.no_grad():
        return functional.cross_entropy(net(valid_images), valid_labels).item()


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Four replicas share two or more cores; none needs several threads for matrices this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


FED = {"codec": "e2m1", "error_feedback": True}
CASES = [
    ({}, 20, THRESHOLD),
    ({**FED, "delay": 2}, 20, THRESHOLD),
]
SLOW_CASES = [
    ({"codec": "int8", "state_codec": "int8"}, 20, THRESHOLD),
    # As SparseLoCo uses them. They need more rounds than momentum does; the mean over all replicas
    # comes to 1.5 in 30.
    ({"codec": "topk128", **AVERAGING}, 30, 0.95),
    ({"fragments": 2}, 30, THRESHOLD),
    (FED, 20, THRESHOLD),
    *(({"codec": name}, 20, THRESHOLD) for name in ("fp32", "bf16", "fp16", "int8", "e2m1")),
    *(({"codec": name, **AVERAGING}, 80, THRESHOLD) for name in ("topk64", "topk128")),
    *(({"delay": delay}, 40, THRESHOLD) for delay in (2, 5)),
    # Mixing slows so short a training down, with a delay and without one: alpha alone has 0.78.
    *(({"delay": delay, "alpha": 0.5}, 40, 0.95) for delay in (2, 5)),
]


@pytest.mark.parametrize(
    ("options", "rounds", "worst"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
    ids=str,
)
def test_it_converges_on_label_sorted_shards(lab, options, rounds, worst):
    loss = final_loss(lab, rounds, **options)
    assert loss < worst, loss
