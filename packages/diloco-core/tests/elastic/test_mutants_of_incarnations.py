"""What keeps an earlier incarnation of a rank from going on is needed: without it, simulated runs
go wrong.
"""

from dataclasses import replace

import pytest
from simulated import (
    Fault,
    Fixed,
    Schedule,
    SimulatedStore,
    SimulatedTraining,
    read_log,
    simulate,
    violations,
)

from diloco_core import Elastic, StoreExchange
from diloco_core._run import _exchange as _exchange_elastic
from diloco_core._run._records._keys import done_key, inner_key, shard_key
from diloco_core._run._records._records import Rollback
from diloco_core._run._sync import _catchup as _elastic_catchup

GOING_BACK = {  # with the syncs before, and the inner step in which rank 0 sleeps for so long
    "elastic": (Elastic(1, grace=5.0, topology="sharded"), 1, {(0, 9): 90.0}),
    "fixed": (Fixed(25.0), 2, {(0, 2): 200.0}),
}
ASLEEP = {"elastic": Elastic(2, grace=3.0), "fixed": Fixed(90.0)}


def _going_back(policy, number):
    """What goes wrong where rank 0 sleeps in a step while rank 1, which has agreed to it, goes back
    to older states.
    """
    settings, syncs, pauses = GOING_BACK[policy]
    before, store = SimulatedTraining(syncs=syncs, sizes=(40, 30)), SimulatedStore()
    simulate(before, Schedule(2, seed=number, latency=0.01), settings, store=store)
    training = SimulatedTraining(syncs=24, sizes=(40, 30), salts=dict(before.salts), pauses=pauses)

    def train(node):
        if node.rank == 1 or node.incarnation > 1:
            node.exchange.settings = replace(settings, resume="newest-whole")
        if (node.rank, node.incarnation) == (1, 1):
            node.sleep(60.0)
            newest = max(
                sync for sync in range(1, 40) if done_key(sync, (sync - 1) % 2) in store.objects
            )
            key = shard_key(newest, (newest - 1) % 2, 1, "")
            for lost in [
                key,
                *(key for key in store.objects if key.startswith(f"deltas/{newest:08}/")),
            ]:
                store.damage(lost, store.objects[lost][:50])
        return training(node)

    outcome = simulate(
        train, Schedule(2, seed=number, latency=0.01), replace(settings, resume=True), store=store
    )
    assert any(isinstance(record, Rollback) for record in read_log(store)[0])
    return violations(outcome, training)


def _asleep(policy, number):
    """What goes wrong where a replica that saves its inner state at every sync sleeps, and is
    replaced meanwhile.
    """
    training, store = SimulatedTraining(syncs=6, sizes=(40,), save_every=1), SimulatedStore()
    faults = [Fault(1, 1, 48 + 5 * number, "zombie", 2.0)]
    schedule = Schedule(3, seed=number, faults=faults, restart_after=0.5, latency=0.01)
    return violations(simulate(training, schedule, ASLEEP[policy], store=store), training)


def no_fence_after_a_rollback(monkeypatch):
    for module in (_exchange_elastic, _elastic_catchup):
        monkeypatch.setattr(module, "obey_rollback", lambda incarnation, rollback: None)


def saving_without_looking_for_a_successor(monkeypatch):
    def mutant(self, parts):
        incarnation = self._running()
        key = inner_key(incarnation.rank, incarnation.epoch, incarnation.sync)
        incarnation.store.put(key, lambda: parts(key))

    monkeypatch.setattr(StoreExchange, "save_inner", mutant)


@pytest.mark.parametrize("policy", ["elastic", "fixed"])
@pytest.mark.parametrize(
    ("mutate", "wrong"),
    [(no_fence_after_a_rollback, _going_back), (saving_without_looking_for_a_successor, _asleep)],
    ids=lambda argument: argument.__name__,
)
def test_an_earlier_incarnation_that_goes_on_is_caught(policy, mutate, wrong, monkeypatch):
    assert [wrong(policy, number) for number in range(2)] == [[]] * 2
    mutate(monkeypatch)
    assert all(wrong(policy, number) for number in range(2)), "every schedule shows it"
