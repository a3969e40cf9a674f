"""Convergence on real data: correct DiLoCo is told apart from eight ways to get it wrong.

scikit-learn's digits sorted by label and cut into one part per replica, so that no replica knows all classes: the case in
which the outer step has most to do. Each mutant changes one thing of the real classes.
"""

import dataclasses
import functools

import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional

from diloco_core import DiLoCo, in_process
from diloco_core._fragment import Fragment
from diloco_core._outer import OuterOptimizer
from diloco_core.testing import run_replicas

REPLICAS, PERIOD, ROUNDS, BATCH = 4, 10, 20, 16
THRESHOLD = 0.60


@functools.cache
def digits():
    """Training images sorted by label, and validation images."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(data.target)[order]
    by_label = torch.argsort(labels[:1400], stable=True)
    return images[:1400][by_label], labels[:1400][by_label], images[1400:], labels[1400:]


class Net(torch.nn.Module):
    """An MLP 64-64-10; its random start does not depend on other threads."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = torch.nn.ParameterList()
        for width, height in ((64, 64), (64, 10)):
            bound = width**-0.5
            for shape in ((height, width), (height,)):
                self.layers.append(torch.empty(shape).uniform_(-bound, bound, generator=generator))

    def forward(self, images):
        hidden = functional.linear(images, self.layers[0], self.layers[1]).relu()
        return functional.linear(hidden, self.layers[2], self.layers[3])


def final_loss(seed, **options):
    """Validation loss of the global copy after all rounds, as rank 0 holds it."""
    images, labels, valid_images, valid_labels = digits()
    part = len(images) // REPLICAS

    def replica(exchange):
        net = Net(seed)
        inner = torch.optim.AdamW(net.parameters(), lr=2e-3)
        generator = torch.Generator().manual_seed(1000 * seed + exchange.rank)
        mine = slice(exchange.rank * part, (exchange.rank + 1) * part)
        with DiLoCo(net, inner, exchange, sync_every=PERIOD, **options) as outer:
            for _ in range(PERIOD * ROUNDS):
                chosen = torch.randint(part, (BATCH,), generator=generator)
                functional.cross_entropy(net(images[mine][chosen]), labels[mine][chosen]).backward()
                inner.step()
                inner.zero_grad()
        return outer.state_dict()["fragments"][0]["copy"][0].clone()

    results = run_replicas(replica, in_process(REPLICAS))
    for result in results:
        assert not isinstance(result, BaseException), result
    net = Net(seed)
    torch.nn.utils.vector_to_parameters(results[0], net.parameters())
    with torch.no_grad():
        return functional.cross_entropy(net(valid_images), valid_labels).item()


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def mean_loss(seeds, **options):
    return sum(final_loss(seed, **options) for seed in range(seeds)) / seeds


def test_diloco_converges_on_label_sorted_shards():
    loss = mean_loss(3)
    assert loss < THRESHOLD, loss


# --- the mutants ---


def parameter_averaging(monkeypatch):
    return {"outer_lr": 1.0, "outer_momentum": 0.0}


def heavy_ball(monkeypatch):
    return {"nesterov": False}


def momentum_reset(monkeypatch):
    real = OuterOptimizer.step

    def step(self, piece, values, gradient):
        self._optimizer.state.clear()
        real(self, piece, values, gradient)

    monkeypatch.setattr(OuterOptimizer, "step", step)
    return {}


def sum_instead_of_mean(monkeypatch):
    real = OuterOptimizer.step
    monkeypatch.setattr(OuterOptimizer, "step", lambda self, piece, values, g: real(self, piece, values, g * REPLICAS))
    return {}


def replicas_do_not_adopt(monkeypatch):
    monkeypatch.setattr(Fragment, "adopt", lambda self, piece, values: None)
    return {}


def only_the_first_replica(monkeypatch):
    real = OuterOptimizer.step
    real_contribution = Fragment.contribution
    ranks = {}

    def contribution(self, piece, out):
        return real_contribution(self, piece, out) if ranks.get(id(self)) == 0 else out.zero_()

    real_init = DiLoCo.__init__

    def init(self, model, inner, exchange, **options):
        real_init(self, model, inner, exchange, **options)
        ranks.update({id(fragment): exchange.rank for fragment in self._fragments})

    monkeypatch.setattr(DiLoCo, "__init__", init)
    monkeypatch.setattr(Fragment, "contribution", contribution)
    monkeypatch.setattr(OuterOptimizer, "step", lambda self, piece, values, g: real(self, piece, values, g * REPLICAS))
    return {}


def no_communication(monkeypatch):
    def sync(self):
        self._since_event, self._committed = 0, self._committed + 1
        fragment = self._fragments[0]
        fragment.take_snapshot()
        self._since_sync[0] = 0
        return dataclasses.make_dataclass("Report", [("committed", bool)])(True)

    monkeypatch.setattr(DiLoCo, "_sync", sync)
    return {}


def wrong_sign(monkeypatch):
    real = OuterOptimizer.step
    monkeypatch.setattr(OuterOptimizer, "step", lambda self, piece, values, g: real(self, piece, values, -g))
    return {}


MUTANTS = [
    parameter_averaging,
    heavy_ball,
    momentum_reset,
    sum_instead_of_mean,
    replicas_do_not_adopt,
    only_the_first_replica,
    no_communication,
    wrong_sign,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_variant_is_caught(mutant, monkeypatch):
    options = mutant(monkeypatch)
    loss = mean_loss(2, **options)
    assert not loss < THRESHOLD, loss
