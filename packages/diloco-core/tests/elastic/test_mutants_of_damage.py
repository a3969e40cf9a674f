"""Without its checksums a simulated run of either kind takes damaged bytes for good ones, and the
simulator's checks say so.
"""

import json
import random
from functools import partial

import pytest
from faults_lab import assert_caught
from simulated import (
    Fault,
    Fixed,
    Schedule,
    SimulatedStore,
    SimulatedTraining,
    simulate,
    violations,
)

from diloco_core import CoreError, Elastic
from diloco_core._arithmetic._sharded import adopt_shard
from diloco_core._run._records import _records as _elastic_records
from diloco_core._store import _reread
from diloco_core._wire import _published
from diloco_core._wire._fields import Fields

POLICIES = {
    "elastic": Elastic(2, grace=8.0, topology="sharded", retention=1),
    "fixed": Fixed(90.0),
}


def _wrong_after_damage(policy, number):
    """What goes wrong where bits flip on their way and objects rot; whoever cannot go on stops by
    name.
    """
    chance = random.Random(number)
    kinds = ("flip", "flip", "rot", "zombie", "kill before")
    faults = [
        Fault(chance.randrange(3), 1, chance.randint(8, 90), chance.choice(kinds), 30.0)
        for _ in range(6)
    ]
    training, store = SimulatedTraining(syncs=6, sizes=(40,), save_every=1), SimulatedStore()
    schedule = Schedule(3, seed=number, faults=faults, restart_after=2.0, latency=0.05)
    outcome = simulate(
        training, schedule, POLICIES[policy], store=store, limit=5000.0, sync_timeout=200.0
    )
    raw = [repr(error) for error in outcome.errors().values() if not isinstance(error, CoreError)]
    wrong = [
        what
        for what in violations(outcome, training)
        if " raised " not in what and "not every rank" not in what
    ]
    return raw + wrong


def no_checksum_of_records(monkeypatch):
    def unsealed(kind, key, data, origin):
        return Fields(json.loads(data), origin)

    monkeypatch.setattr(_elastic_records, "unsealed_fields", unsealed)


def no_checksum_of_shards(monkeypatch):
    def adopt(self, reader, origin, scratch):
        values = self._values_of(reader, origin)
        adopt_shard(
            self.job,
            self.number,
            lambda piece, out: (values.read(out), out)[1],
            self.chunk_bytes,
            scratch,
        )
        return _published.end_sums(reader, origin)

    monkeypatch.setattr(_published.Shard, "adopt", adopt)


@pytest.mark.parametrize(
    ("policy", "mutate", "first"),
    [
        ("elastic", no_checksum_of_records, 2),
        ("elastic", no_checksum_of_shards, 4),
        ("fixed", no_checksum_of_records, 22),
        ("fixed", no_checksum_of_shards, 40),
    ],
)
def test_without_a_checksum_damage_is_caught(policy, mutate, first, monkeypatch):
    mutate(monkeypatch)
    assert_caught(partial(_wrong_after_damage, policy), first=first, runs=60)


@pytest.mark.parametrize(("policy", "runs"), [("elastic", 15), ("fixed", 8)])
def test_the_same_damage_is_harmless_with_all_rules(policy, runs):
    assert [_wrong_after_damage(policy, number) for number in range(runs)] == [[]] * runs


def no_second_reading(monkeypatch):
    monkeypatch.setattr(_reread, "REREADS", ())


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_second_reading_a_flipped_bit_costs_an_incarnation(policy, monkeypatch):
    def incarnations():
        faults = [
            Fault(rank, 1, operation, "flip") for rank in range(3) for operation in (9, 30, 60)
        ]
        outcome = simulate(
            SimulatedTraining(syncs=6, sizes=(40,)),
            Schedule(3, faults=faults),
            POLICIES[policy],
        )
        return outcome.errors()

    assert incarnations() == {}
    no_second_reading(monkeypatch)
    assert incarnations() != {}
