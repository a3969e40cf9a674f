"""Every object of an elastic run with one flipped bit or cut short: the same model comes of it, or an error with a name."""

import copy

import pytest
import torch

from diloco_core import CoreError, Elastic
from diloco_core.testing import Schedule, SimulatedStore, SimulatedTraining, simulate, violations

_SYNCS = 4


class _Run:
    """A run that has stopped, to be damaged and gone on with."""

    def __init__(self, topology):
        torch.set_num_threads(1)
        self.settings = Elastic(2, grace=5.0, topology=topology, publish_every=1)
        self.store = SimulatedStore()
        self.training = SimulatedTraining(syncs=_SYNCS, sizes=(12, 9), sync_every=2)
        outcome = simulate(self.training, Schedule(2, latency=0.01), self.settings, store=self.store)
        assert violations(outcome, self.training) == []

    def resumed(self, damage, **settings):
        """What comes of it when ``damage(objects)`` has happened: errors by life, and what is wrong with the models."""
        store = copy.deepcopy(self.store)
        for key, data in damage(store.objects).items():
            store.damage(key, data)
        training = SimulatedTraining(syncs=_SYNCS + 2, sizes=(12, 9), salts=dict(self.training.salts), sync_every=2)
        outcome = simulate(training, Schedule(2, seed=1, latency=0.01), self.settings, store=store, most_lives=1)
        wrong = [what for what in violations(outcome, training) if what.startswith("after sync")]
        return outcome.errors(), wrong


@pytest.fixture(scope="module", params=["sharded", "gather"])
def run(request):
    return _Run(request.param)


def _kinds(store):
    """A newest object of every kind."""
    found = {}
    for key in sorted(store.objects):
        folder, _, name = key.partition("/")
        found[folder, name.endswith(".json"), name.split(".")[0][-3:]] = key
    return sorted(found.values())


def _named(errors):
    return all(isinstance(error, CoreError) for error in errors.values())


def _flipped(data, position):
    damaged = bytearray(data)
    damaged[position // 8] ^= 1 << position % 8
    return bytes(damaged)


def _sweep(run, stride):
    for number, key in enumerate(_kinds(run.store)):
        data = run.store.objects[key]
        for position in range(number % stride, 8 * len(data), stride):
            errors, wrong = run.resumed(lambda objects, k=key, p=position: {k: _flipped(objects[k], p)})
            assert _named(errors), (key, position, errors)
            assert wrong == [], (key, position, wrong)
        for size in range(number % stride, len(data), max(1, stride // 8)):
            errors, wrong = run.resumed(lambda objects, k=key, s=size: {k: objects[k][:s]})
            assert _named(errors), (key, size, errors)
            assert wrong == [], (key, size, wrong)


def test_one_bit_at_rest(run):
    _sweep(run, 2003)


@pytest.mark.slow
def test_every_bit_at_rest(run):
    _sweep(run, 1)
