"""Every safety rule is needed: without it, some simulated run goes wrong."""

import json
import random
from dataclasses import replace
from functools import partial

import pytest
from faults_lab import assert_caught, harmful
from fixed_lab import LATE, LOST_AFTER
from simulated import (
    CheckedStore,
    Fault,
    Fixed,
    Schedule,
    SimulatedTraining,
    read_log,
    simulate,
    violations,
)

from diloco_core import CoreError, Elastic, StoreExchange
from diloco_core._arithmetic._rate import NO_RATE
from diloco_core._arithmetic._sharded import adopt_shard
from diloco_core._outer._fragment import Fragment
from diloco_core._run import _exchange, _joining
from diloco_core._run._incarnation._standing import Standing
from diloco_core._run._records import _records
from diloco_core._run._records._keys import Delta, deltas, done_key, inner_key, shard_key
from diloco_core._run._records._records import Commit, Rollback
from diloco_core._run._records._rules import newest_done
from diloco_core._run._repair import read_commit
from diloco_core._run._round import _membership
from diloco_core._run._round._shares import Shares
from diloco_core._run._states import _publish
from diloco_core._run._sync import _adopt, _catchup
from diloco_core._run._sync._adopt import Adoption
from diloco_core._run._sync._sync import StoreSync
from diloco_core._store import _reread
from diloco_core._store._patient import Patient
from diloco_core._wire import _published
from diloco_core._wire._sealed import Fields

POLICIES = ["elastic", "fixed"]
DAMAGED = {
    "elastic": Elastic(2, grace=8.0, topology="sharded", retention=1),
    "fixed": Fixed(LOST_AFTER),
}


def wrong(number, fixed=False, asking=False):
    """Return what goes wrong in a simulated run; ``asking``: for learning rates."""
    chance = random.Random(number)
    faults = harmful(chance, 7)
    starts = [chance.choice([0.0, 1.0, 25.0]) for _ in range(3)]
    rates = {}
    if asking:
        when = [
            (chance.randrange(3), chance.choice([1, 1, 2]), chance.randint(0, 9)) for _ in "12345"
        ]
        rates["wishes"] = {each: (n + 1) / 16 for n, each in enumerate(when)}
        rates["lr"] = lambda rank, incarnation, sync: 1 / (1 + rank + 2 * incarnation + sync)
    training = SimulatedTraining(syncs=5, sizes=(40,), **rates)
    schedule = Schedule(
        3, seed=number, starts=starts, faults=faults, restart_after=2.0, latency=0.3
    )
    elastic = Elastic(2, grace=8.0, topology="sharded", retention=2)
    settings = Fixed(LOST_AFTER) if fixed else elastic
    outcome = simulate(training, schedule, settings, store=CheckedStore(), limit=5000.0)
    return [what for what in violations(outcome, training) if LATE not in what]


class Mistaken(Commit):
    """A record that is taken for the one in the log, although it names other members."""

    digest = ""  # that of the record in the log


def decide_from_own_listing(monkeypatch):
    wait = StoreSync._wait

    def mutant(self):
        record = wait(self)
        chosen = self._round.valid(self._incarnation.store.list(deltas(self._sync)))
        if record is None or not chosen:
            return record
        members = tuple(chosen.values())
        positions = self._progress.counting(members)
        incarnation, steps = self._incarnation, self._progress.outer_steps + 1
        place = self._sync, self._index, self._base, incarnation.standing.previous
        mistaken = Mistaken(*place, members, positions, steps, run=incarnation.run)
        object.__setattr__(mistaken, "digest", record.digest)
        return mistaken

    monkeypatch.setattr(StoreSync, "_wait", mutant)


def no_incarnation(monkeypatch):
    monkeypatch.setattr(_joining, "claim", lambda *_: (1, b""))
    monkeypatch.setattr(_exchange, "check_claim", lambda incarnation: None)
    monkeypatch.setattr(_exchange, "watch_claim", lambda incarnation: None)


def record_before_payload(monkeypatch):
    put, listed, leaves = Patient.put, Patient.list, StoreSync._leaves

    def late(self, key, parts):
        if Delta.parse(key) is None:
            return put(self, key, parts)
        whole = [bytes(part) for part in parts()]
        self.held = (key, whole)
        return sum(map(len, whole))

    def listed_with_own(self, prefix):
        listing = listed(self, prefix)
        if self.held is not None and prefix == deltas(Delta.parse(self.held[0]).sync):
            listing[self.held[0]] = sum(map(len, self.held[1]))
        return listing

    def act_then_put(self, decision):
        left = leaves(self, decision)
        if self._incarnation.store.held is not None:
            key, whole = self._incarnation.store.held
            put(self._incarnation.store, key, lambda: whole)
        return left

    monkeypatch.setattr(Patient, "put", late)
    monkeypatch.setattr(Patient, "held", None, raising=False)
    monkeypatch.setattr(Patient, "list", listed_with_own)
    monkeypatch.setattr(StoreSync, "_leaves", act_then_put)


def owner_only_update(monkeypatch):
    monkeypatch.setattr(Shares, "turn", lambda self, shard: 1e9)


def overwrite_instead_of_create(monkeypatch):
    def put(self, key, parts):
        data = parts()
        self.attempt(lambda: self.store.put(key, [data] if isinstance(data, bytes) else data))
        return True

    monkeypatch.setattr(Patient, "create", put)
    monkeypatch.setattr(Patient, "creates_once", lambda self: True)


def no_replay(monkeypatch):
    def skip(incarnation):
        while (record := read_commit(incarnation, incarnation.sync + 1)) is not None:
            incarnation.standing.skip(record)

    monkeypatch.setattr(_catchup, "replay", skip)


def collection_without_retention(monkeypatch):
    def everything(keys, *, last, **_):
        old = tuple(
            f"{folder}/{sync:08}/" for folder in ("deltas", "state") for sync in range(1, last)
        )
        return [key for key in keys if key.startswith(old)]

    monkeypatch.setattr(_publish, "collectable", everything)


def one_complete_state_less(monkeypatch):
    monkeypatch.setattr(
        _publish, "kept_from", lambda listing, fragments, **_: newest_done(listing, fragments)
    )


def no_quorum(monkeypatch):
    rule = _membership.Round.may_commit

    def mutant(at, folder, *, overdue):
        return rule(replace(at, min_replicas=1), folder, overdue=overdue)

    monkeypatch.setattr(_membership.Round, "may_commit", mutant)


def done_before_the_shards(monkeypatch):
    monkeypatch.setattr(_adopt, "publish_previous", lambda *_: None)
    run = Adoption.run

    def early(self):
        if self._shares.designated:
            _adopt.write_done(self._incarnation, self._commit)
        return run(self)

    monkeypatch.setattr(Adoption, "run", early)


# With the number of the first run that shows it, as a rule: looked at first, since others take long
MUTANTS = {
    decide_from_own_listing: 19,
    no_incarnation: 0,
    record_before_payload: 5,
    owner_only_update: 5,
    overwrite_instead_of_create: 38,
    no_replay: 1,
    collection_without_retention: 0,
    one_complete_state_less: 0,
    no_quorum: 2,
    done_before_the_shards: 0,
}


def own_rate_in_place_of_the_records(monkeypatch):
    rate = property(lambda self: self.contribution.proposal.standing, lambda self, rate: None)
    monkeypatch.setattr(Fragment, "rate", rate, raising=False)


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


RATES = {
    own_rate_in_place_of_the_records: 0,
    wish_after_the_contribution: 1,
    forgets_the_last_change: 1,
    does_not_look_for_wishes: 0,
}


# ``fixed/test_fixed_mutants.py`` has the others in the form that they have there. Fixed runs lack
# two of the rules: the quorum, since all are waited for, and that others stand in for an owner,
# since nobody else has its part.
FIXED = {record_before_payload: 2, no_replay: 3, done_before_the_shards: 1}
RULES = [
    *((wrong, *mutant) for mutant in MUTANTS.items()),
    *((partial(wrong, asking=True), *mutant) for mutant in RATES.items()),
    *((partial(wrong, fixed=True), *mutant) for mutant in FIXED.items()),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("run", "mutate", "first"), RULES)
def test_a_broken_rule_is_caught(run, mutate, first):
    assert_caught(run, mutate, first=first)


def wrong_after_damage(policy, number):
    """Return what goes wrong where objects rot, apart from replicas that stop by name."""
    chance = random.Random(number)
    kinds = ("flip", "flip", "rot", "zombie", "kill before")
    faults = [
        Fault(chance.randrange(3), 1, chance.randint(8, 90), chance.choice(kinds), 30.0)
        for _ in range(6)
    ]
    training = SimulatedTraining(syncs=6, sizes=(40,), save_every=1)
    schedule = Schedule(3, seed=number, faults=faults, restart_after=2.0, latency=0.05)
    outcome = simulate(training, schedule, DAMAGED[policy], limit=5000.0, sync_timeout=200.0)
    raw = [repr(error) for error in outcome.errors().values() if not isinstance(error, CoreError)]
    by_name = (" raised ", "not every rank")
    errors = violations(outcome, training)
    return raw + [what for what in errors if not any(part in what for part in by_name)]


def no_checksum_of_records(monkeypatch):
    def unsealed(kind, key, data, origin):
        return Fields(json.loads(data), origin)

    monkeypatch.setattr(_records, "unsealed_fields", unsealed)


def no_checksum_of_shards(monkeypatch):
    def adopt(self, reader, origin, scratch):
        values = self._values_of(reader, origin)

        def read(piece, out):
            values.read(out)
            return out

        adopt_shard(self.job, self.number, read, self.chunk_bytes, scratch)
        return _published.end_sums(reader, origin)

    monkeypatch.setattr(_published.Shard, "adopt", adopt)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("policy", "mutate", "first"),
    [
        ("elastic", no_checksum_of_records, 2),
        ("elastic", no_checksum_of_shards, 4),
        ("fixed", no_checksum_of_records, 22),
        ("fixed", no_checksum_of_shards, 40),
    ],
)
def test_without_a_checksum_damage_is_caught(policy, mutate, first):
    assert_caught(partial(wrong_after_damage, policy), mutate, first=first)


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_second_reading_a_flipped_bit_costs_an_incarnation(policy, monkeypatch):
    flips = [Fault(rank, 1, operation, "flip") for rank in range(3) for operation in (9, 30, 60)]

    def errors():
        training = SimulatedTraining(syncs=6, sizes=(40,))
        return simulate(training, Schedule(3, faults=flips), DAMAGED[policy]).errors()

    assert errors() == {}
    monkeypatch.setattr(_reread, "REREADS", ())
    assert errors() != {}


GOING_BACK = {  # with the syncs before, and the inner step in which rank 0 sleeps for so long
    "elastic": (Elastic(1, grace=5.0, topology="sharded"), 1, {(0, 9): 90.0}),
    "fixed": (Fixed(25.0), 2, {(0, 2): 200.0}),
}


def going_back(policy, number):
    """Return what goes wrong if rank 0 sleeps in a step while rank 1 goes back to older states."""
    settings, syncs, pauses = GOING_BACK[policy]
    before, store = SimulatedTraining(syncs=syncs, sizes=(40, 30)), CheckedStore()
    schedule = Schedule(2, seed=number, latency=0.01)
    simulate(before, schedule, settings, store=store)
    training = SimulatedTraining(syncs=24, sizes=(40, 30), salts=dict(before.salts), pauses=pauses)

    def train(node):
        if node.rank == 1 or node.incarnation > 1:
            node.exchange.settings = replace(node.exchange.settings, resume="newest-whole")
        if (node.rank, node.incarnation) == (1, 1):
            node.sleep(60.0)
            syncs = range(1, 40)
            newest = max(sync for sync in syncs if done_key(sync, (sync - 1) % 2) in store.objects)
            lost = (shard_key(newest, (newest - 1) % 2, 1, ""), f"deltas/{newest:08}/")
            for key in [key for key in store.objects if key.startswith(lost)]:
                store.damage(key, store.objects[key][:50])
        return training(node)

    outcome = simulate(train, schedule, replace(settings, resume=True), store=store)
    assert any(isinstance(record, Rollback) for record in read_log(store)[0])
    return violations(outcome, training)


def asleep(policy, number):
    """Return what goes wrong if a replica that saves at every sync sleeps, and is replaced."""
    settings = {"elastic": Elastic(2, grace=3.0), "fixed": Fixed(LOST_AFTER)}[policy]
    training = SimulatedTraining(syncs=6, sizes=(40,), save_every=1)
    faults = [Fault(1, 1, 48 + 5 * number, "zombie", 2.0)]
    schedule = Schedule(3, seed=number, faults=faults, restart_after=0.5, latency=0.01)
    return violations(simulate(training, schedule, settings), training)


def no_fence_after_a_rollback(monkeypatch):
    for module in (_joining, _catchup):
        monkeypatch.setattr(module, "obey_rollback", lambda incarnation, rollback: None)


def saving_without_looking_for_a_successor(monkeypatch):
    def mutant(self, parts):
        incarnation = self._running()
        key = inner_key(incarnation.rank, incarnation.epoch, incarnation.sync)
        incarnation.store.put(key, lambda: parts(key))

    monkeypatch.setattr(StoreExchange, "save_inner", mutant)


@pytest.mark.sampled
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("mutate", "act"),
    [(no_fence_after_a_rollback, going_back), (saving_without_looking_for_a_successor, asleep)],
    ids=lambda argument: argument.__name__,
)
def test_an_earlier_incarnation_that_goes_on_is_caught(policy, mutate, act, monkeypatch):
    assert [act(policy, number) for number in range(2)] == [[]] * 2
    mutate(monkeypatch)
    assert all(act(policy, number) for number in range(2)), "every schedule shows it"
