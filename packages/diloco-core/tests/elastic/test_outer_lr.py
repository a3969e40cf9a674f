"""The outer learning rate in elastic runs: whatever goes wrong, every replica and every replay
takes the record's.
"""

import random

import pytest
from faults_lab import harmful
from simulated import (
    Schedule,
    SimulatedStore,
    SimulatedTraining,
    broken_promises,
    read_log,
    simulate,
    violations,
)

from diloco_core import Elastic
from diloco_core._arithmetic._rate import NO_RATE
from diloco_core._outer._fragment import Fragment
from diloco_core._run._incarnation._standing import Standing
from diloco_core._run._sync._sync import StoreSync


def of_its_own(rank, incarnation, sync):
    """A function that is another one for every incarnation, as on another machine, or after the
    program was changed.
    """
    return 1 / (1 + rank + 2 * incarnation + sync)


def _run(number):
    """A simulated run with wishes at random: what goes wrong, and the records that hear one."""
    chance = random.Random(number)
    faults = harmful(chance, chance.randint(0, 6))
    wishes = {
        (chance.randrange(3), chance.choice([1, 1, 2]), chance.randint(0, 9)): number / 16
        for number in range(1, 6)
    }
    sizes = chance.choice([(40,), (40, 30)])
    delay, alpha = chance.choice([(0, 0.0), (1, 0.0), (2, 0.5)])
    training = SimulatedTraining(
        syncs=6,
        sizes=sizes,
        sync_every=3 * len(sizes) if delay else 2,
        delay=delay,
        alpha=alpha,
        lr=of_its_own,
        wishes=wishes,
    )
    store, broken = SimulatedStore(), []
    store.after_delete = lambda keys: broken.extend(broken_promises(store, keys))
    topology = chance.choice(["sharded", "gather"])
    settings = Elastic(
        chance.randint(1, 3),
        grace=8.0,
        topology=topology,
        late=chance.choice(["carry", "drop"]),
        publish_every=chance.randint(1, 3) if topology == "gather" else None,
        retention=chance.randint(1, 2),
    )
    schedule = Schedule(
        3, seed=number, faults=faults, restart_after=2.0, latency=chance.choice([0.02, 0.3])
    )
    outcome = simulate(training, schedule, settings, store=store, limit=5000.0)
    heard = {record.rate.number for record in read_log(store)[0] if record.rate.number}
    return violations(outcome, training) + broken, heard


@pytest.mark.parametrize("numbers", [range(6), pytest.param(range(6, 400), marks=pytest.mark.slow)])
def test_wishes_are_heard_whatever_goes_wrong(numbers):
    results = [_run(number) for number in numbers]
    assert [wrong for wrong, _ in results] == [[]] * len(numbers)
    assert sum(len(heard) for _, heard in results) > len(numbers)


def own_rate_in_place_of_the_records(monkeypatch):
    own = property(lambda self: self.contribution.proposal.standing, lambda self, rate: None)
    monkeypatch.setattr(Fragment, "rate", own, raising=False)


def wish_after_the_contribution(monkeypatch):
    ask, wait = StoreSync._ask, StoreSync._wait

    def mutant(self):
        ask(self, self.wish)
        return wait(self)

    monkeypatch.setattr(StoreSync, "wish", (), raising=False)
    monkeypatch.setattr(StoreSync, "_ask", lambda self, wish: setattr(self, "wish", wish))
    monkeypatch.setattr(StoreSync, "_wait", mutant)


def forgets_the_last_change(monkeypatch):
    monkeypatch.setattr(Standing, "rate", NO_RATE)


def does_not_look_for_wishes(monkeypatch):
    monkeypatch.setattr(
        "diloco_core._run._sync._sync.rate_of", lambda standing, listing, schema: standing
    )


@pytest.mark.parametrize(
    ("mutate", "first"),
    [
        (own_rate_in_place_of_the_records, 0),
        (wish_after_the_contribution, 29),
        (forgets_the_last_change, 4),
        (does_not_look_for_wishes, 0),
    ],
    ids=lambda argument: getattr(argument, "__name__", ""),
)
def test_without_a_rule_some_run_goes_wrong(mutate, first, monkeypatch):
    mutate(monkeypatch)
    assert any(_run(number)[0] for number in range(first, first + 60))


def test_a_wish_stands_until_a_sync_counts_its_maker():
    """It is held up while it asks, so that syncs are decided without it."""
    training = SimulatedTraining(
        syncs=10, sizes=(40,), pauses={(0, 2): 14.0}, wishes={(0, 1, 2): 0.25}
    )
    outcome = simulate(training, Schedule(3), Elastic(2, grace=8.0))
    log, _ = read_log(outcome.store)
    left_out = [record.sync for record in log if 0 not in {m.rank for m in record.members}]
    rates = [record.rate.values[0] for record in log]
    assert violations(outcome, training) == []
    assert left_out[0] == 2
    assert left_out[-1] < len(rates)
    back = left_out[-1]
    assert rates == [0.7] * back + [0.25] * (len(rates) - back)
