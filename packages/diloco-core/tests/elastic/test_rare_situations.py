"""Elastic runs in situations that are easy to get wrong, one by one."""

import pytest
import torch
from simulated import Fault, Schedule, SimulatedStore, SimulatedTraining, flawless, once

from diloco_core import CoreError, CorruptedObjectError, DiLoCo, Elastic, StoreUnavailableError
from diloco_core._run._records._keys import commit_key
from diloco_core._run._records._records import Commit


def test_newest_states_that_lie_far_apart():
    # Gather publishes the state after sync 3 while that after sync 4 is not complete yet, so sync 1
    # is read again, which counted fewer ranks: rank 2 was late for it.
    for step in range(148, 170, 3):
        training = SimulatedTraining(syncs=9, sizes=(40, 40), pauses={(2, 0): 1.5})
        schedule = Schedule(3, faults=[Fault(1, 1, step, "kill before")], restart_after=0.1)
        settings = Elastic(2, grace=1.0, topology="gather", publish_every=2)
        flawless(training, schedule, settings)


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_gather_leaving_while_others_collect_what_was_just_published(step):
    for operation in range(60, 125, step):
        short = SimulatedTraining(syncs=3, sizes=(40,))
        long = SimulatedTraining(syncs=12, sizes=(40,))
        schedule = Schedule(3, faults=[Fault(2, 1, operation, "delay", 40.0)], latency=0.01)
        settings = Elastic(2, grace=5.0, topology="gather", publish_every=1, retention=1)

        def train(node, short=short, long=long):
            return (short if node.rank == 2 else long)(node)

        outcome = once(train, schedule, settings)
        assert outcome.errors() == {}


def test_what_a_flush_left_behind_is_open():
    fates = []

    def train(node):
        net = torch.nn.ParameterList([torch.zeros(64)])
        inner = torch.optim.SGD(net.parameters(), lr=1.0)

        def seen(report):
            if node.rank == 0:
                fates.append(report.contribution)

        with DiLoCo(net, inner, node.exchange, sync_every=2, on_sync=seen) as outer:
            while outer.committed < 4:
                node.sleep(20.0 if node.rank == 1 and outer.inner_steps < 2 else 1.0)
                net[0].grad = torch.ones(64)
                inner.step()
                if node.rank == 0 and outer.inner_steps == 1:
                    outer.flush()

        return net[0].detach().clone()

    outcome = once(train, Schedule(2), Elastic(2, grace=5.0, topology="sharded"))
    first = Commit.from_json(outcome.store.objects[commit_key(1)], 1, "")
    assert (first.members[0].start, first.members[0].stop) == (0, 1)
    assert fates[0] == "open"
    # Each half was updated by another replica: both have counted the very same contribution.
    assert all(bool((values == values[0]).all()) for values in outcome.results.values())


def test_a_store_that_is_down_for_good_is_noticed_within_the_timeout():
    down = []

    def train(node):
        request = node.connection._request

        def failing(*given):
            if node.connection.clock() > 7.0:
                down.append(node.connection.clock())
                node.sleep(0.1)
                raise StoreUnavailableError("refused")
            return request(*given)

        node.connection._request = failing
        return SimulatedTraining(syncs=9)(node)

    settings = Elastic(1, grace=10.0)
    outcome = once(train, Schedule(1), settings, sync_timeout=100.0)
    assert isinstance(outcome.results[0, 1], CoreError)
    assert down[-1] - down[0] < 200


def test_with_two_damaged_contributions_it_says_what_to_do(publishing):
    """Of one alone, its author does what the others cannot."""

    class Damaging(SimulatedStore):
        __slots__ = ()

        def write(self, key, data):
            if key.startswith(("deltas/00000003/00000.", "deltas/00000003/00001.")):
                data = data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]
            SimulatedStore.write(self, key, data)

    outcome = once(
        SimulatedTraining(syncs=6, sizes=(40,)), 3, publishing(2, grace=5.0), store=Damaging()
    )
    errors = [each for each in outcome.errors().values() if isinstance(each, CorruptedObjectError)]
    assert errors, outcome.errors()
    assert all("started with resume='newest-whole'" in str(error) for error in errors)
