"""Every object of an elastic run with one flipped bit, cut short, or gone: the same model comes of it.

Only the manifest cannot be made again from anything else; without it there is an error with a name.
"""

import copy

import pytest
import torch

from diloco_core import CorruptedObjectError, Elastic, RunExistsError
from diloco_core._elastic_records import MANIFEST
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
            store.remove(key) if data is None else store.damage(key, data)
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


def _check(run, key, damaged):
    errors, wrong = run.resumed(lambda objects: {key: damaged})
    if key == MANIFEST:
        assert {type(error) for error in errors.values()} <= {CorruptedObjectError, RunExistsError}, (key, errors)
    else:
        assert errors == {}, (key, errors)
    assert wrong == [], (key, wrong)


def _flipped(data, position):
    damaged = bytearray(data)
    damaged[position // 8] ^= 1 << position % 8
    return bytes(damaged)


def _sweep(run, stride):
    for number, key in enumerate(_kinds(run.store)):
        data = run.store.objects[key]
        for position in range(number % stride, 8 * len(data), stride):
            _check(run, key, _flipped(data, position))
        for size in range(number % stride, len(data), max(1, stride // 8)):
            _check(run, key, data[:size])
        _check(run, key, None)


def test_one_bit_at_rest(run):
    _sweep(run, 8009)


@pytest.mark.slow
def test_every_bit_at_rest(run):
    _sweep(run, 1)
