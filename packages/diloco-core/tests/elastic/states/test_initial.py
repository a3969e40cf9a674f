"""The initial state is kept whole by replicas that have its values until a newer one is."""

import logging
import re
from functools import cache

import pytest
import torch
from damage_lab import Watched, store_of
from simulated import Fault, Schedule, once, simulate

from diloco_core import CorruptedObjectError, DiLoCo, Elastic

pytestmark = pytest.mark.sampled

SETTINGS = {"grace": 10.0}


def train(target, *values):
    """Steps of a model of two fragments, the same every time; its values at the end.

    ``values``: what each rank begins with.
    """

    def replica(node):
        value = values[node.rank % len(values)]
        model = torch.nn.ParameterList([torch.full((40,), value), torch.full((30,), value)])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, node.exchange, sync_every=2, fragments=2) as outer:
            while outer.committed < target:
                node.sleep(1.0)
                for parameter in model:
                    parameter.grad = torch.full_like(parameter, 0.1 * (node.rank + 1))
                inner.step()
        return torch.cat([parameter.detach() for parameter in model])

    return replica


@cache
def killed_early(topology):
    """Return what a run left that died at a sync, and its states without a successor."""
    settings = Elastic(2, topology=topology, **SETTINGS)
    for operation in [*range(48, 300, 4), *range(24, 48, 4)]:  # the first shows it, as a rule
        faults = [Fault(rank, 1, operation, "kill before") for rank in range(2)]
        schedule = Schedule(2, 1, faults=faults)
        store = once(train(30, 1.0), schedule, settings, sync_timeout=100.0).store
        done = {key.split("/")[2][:3] for key in store.below("state") if key.endswith("done.json")}
        keys = [key for key in sorted(store.below("initial")) if key.split("/")[2][:3] not in done]
        if store.below("commits") and keys:
            return store.objects, keys
    raise AssertionError("no such moment")


def resumed(store, topology, *values):
    settings = Elastic(2, topology=topology, resume=True, **SETTINGS)
    options = {"most_incarnations": 2, "sync_timeout": 100.0}
    return simulate(train(6, *values), Schedule(2, 2), settings, store=store, **options)


HARMS = {
    "values": lambda data: data[:-30] + bytes([data[-30] ^ 1]) + data[-29:],
    "header": lambda data: data[:12] + bytes([data[12] ^ 1]) + data[13:],
    "cut": lambda data: data[:50],
    "gone": None,
}


@pytest.mark.parametrize("values", [(1.0,), (1.0, 2.0)], ids=["both", "one"])
@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_what_is_damaged_or_gone_is_written_again(topology, values, caplog):
    """One replica that has the values is enough, whichever shard it is."""
    objects, keys = killed_early(topology)
    expected = resumed(store_of(objects), topology, 1.0)
    assert expected.finished
    assert len(keys) >= 2
    for key in keys:
        for harm in HARMS.values() if len(values) == 1 else [HARMS["values"]]:
            damaged = store_of(objects)
            if harm is None:
                damaged.remove(key)
            else:
                damaged.damage(key, harm(damaged.objects[key]))
            caplog.clear()
            with caplog.at_level(logging.ERROR):
                outcome = resumed(damaged, topology, *values)
            assert outcome.finished, outcome.errors()
            assert re.search(r"writing initial/\S+ again with the same content", caplog.text)
            assert damaged.objects.get(key, objects[key]) == objects[key]
            pairs = zip(outcome.results.values(), expected.results.values(), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("which", range(4))
def test_who_cannot_read_it_asks_for_it(which, caplog):
    def harm(key, data):
        if key == "manifest.json":  # the run has just begun
            wanted = sorted(store.below("initial"))[which]
            store.damage(wanted, HARMS["values"](store.objects[wanted]))

    store, schedule = Watched(harm), Schedule(2, 3, starts=[0.0, 1.0])
    options = {"store": store, "sync_timeout": 100.0}
    with caplog.at_level(logging.ERROR):
        outcome = once(train(6, 1.0, 2.0), schedule, Elastic(2, **SETTINGS), **options)
    assert outcome.finished, outcome.errors()
    assert re.search(r"writing initial/\S+ again with the same content", caplog.text)


def test_a_replica_with_other_values_cannot_write_it_again():
    objects, (*_, key) = killed_early("sharded")
    assert resumed(store_of(objects), "sharded", 2.0).finished, "it takes those of the run"
    store = store_of(objects)
    store.damage(key, HARMS["values"](store.objects[key]))
    outcome = resumed(store, "sharded", 2.0)
    assert not outcome.finished
    assert any(
        isinstance(error, CorruptedObjectError) and key in str(error)
        for error in outcome.errors().values()
    )
