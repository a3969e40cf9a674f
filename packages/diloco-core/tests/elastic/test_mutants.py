"""Every safety rule is needed: without it, some simulated run goes wrong, and the simulator's
checks say so.
"""

import random
from functools import partial

import pytest
from faults_lab import assert_caught, harmful
from fixed_lab import LATE, LOST_AFTER
from simulated import (
    Fixed,
    Schedule,
    SimulatedStore,
    SimulatedTraining,
    broken_promises,
    simulate,
    violations,
)

from diloco_core import Elastic
from diloco_core._run import _exchange as _exchange_elastic
from diloco_core._run import _joining
from diloco_core._run._records._keys import Delta, deltas
from diloco_core._run._records._records import Commit
from diloco_core._run._records._rules import newest_done
from diloco_core._run._repair import read_commit
from diloco_core._run._round import _membership
from diloco_core._run._round._shares import Shares
from diloco_core._run._states import _publish as _elastic_publish
from diloco_core._run._sync import _adopt as _elastic_adopt
from diloco_core._run._sync import _catchup as _elastic_catchup
from diloco_core._run._sync._adopt import Adoption
from diloco_core._run._sync._sync import StoreSync
from diloco_core._store._patient import Patient


def _wrong(number, topology="sharded", fixed=False):
    """What goes wrong in the simulated run with this number."""
    chance = random.Random(number)
    faults = harmful(chance, 7)
    training, store, broken = SimulatedTraining(syncs=5, sizes=(40,)), SimulatedStore(), []
    store.after_delete = lambda keys: broken.extend(broken_promises(store, keys))
    starts = [chance.choice([0.0, 1.0, 25.0]) for _ in range(3)]
    schedule = Schedule(
        3, seed=number, starts=starts, faults=faults, restart_after=2.0, latency=0.3
    )
    elastic = Elastic(
        2,
        grace=8.0,
        topology=topology,
        retention=2,
        publish_every=2 if topology == "gather" else None,
    )
    settings = Fixed(LOST_AFTER) if fixed else elastic
    outcome = simulate(training, schedule, settings, store=store, limit=5000.0)
    found = [what for what in violations(outcome, training) if LATE not in what]
    return found + broken


def decide_from_own_listing(monkeypatch):
    wait = StoreSync._wait

    def mutant(self):
        found = wait(self)
        chosen = self._round.valid(self._incarnation.store.list(deltas(self._sync)))
        if not isinstance(found, tuple) or not chosen:
            return found
        members = tuple(chosen.values())
        positions = self._progress.counting(members)
        return Commit(
            self._sync,
            self._index,
            self._base,
            self._incarnation.standing.previous,
            members,
            positions,
            self._progress.outer_steps + 1,
            run=self._incarnation.run,
        ), found[1]

    monkeypatch.setattr(StoreSync, "_wait", mutant)


def no_incarnation(monkeypatch):
    monkeypatch.setattr(_joining, "claim", lambda *_: (1, b""))
    monkeypatch.setattr(_exchange_elastic, "check_claim", lambda incarnation: None)
    monkeypatch.setattr(_exchange_elastic, "watch_claim", lambda incarnation: None)


def record_before_payload(monkeypatch):
    put, listed = Patient.put, Patient.list

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

    leaves = StoreSync._leaves

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
        while (found := read_commit(incarnation, incarnation.sync + 1)) is not None:
            incarnation.standing.skip(*found)

    monkeypatch.setattr(_elastic_catchup, "replay", skip)


def collection_without_retention(monkeypatch):
    def everything(keys, *, last, **_):
        old = tuple(
            f"{folder}/{sync:08}/" for folder in ("deltas", "state") for sync in range(1, last)
        )
        return [key for key in keys if key.startswith(old)]

    monkeypatch.setattr(_elastic_publish, "collectable", everything)


def no_quorum(monkeypatch):
    rule = _membership.may_commit
    monkeypatch.setattr(
        _membership,
        "may_commit",
        lambda *args, **options: rule(*args, **{**options, "min_replicas": 1}),
    )


def done_before_the_shards(monkeypatch):
    monkeypatch.setattr(_elastic_adopt, "publish_previous", lambda *_: None)
    run = Adoption.run

    def early(self):
        if self._shares.designated:
            _elastic_adopt.write_done(self._incarnation, self._commit)
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
    no_quorum: 2,
    done_before_the_shards: 0,
}


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_broken_rule_is_caught(mutate, monkeypatch):
    mutate(monkeypatch)
    assert_caught(_wrong, first=MUTANTS[mutate], runs=60)


# ``fixed/test_fixed_mutants.py`` has the others in the form that they have there. Fixed runs lack
# two of the rules: the quorum, since all are waited for, and that others stand in for an owner,
# since nobody else has its part.
FIXED = {record_before_payload: 2, no_replay: 3, done_before_the_shards: 1}


@pytest.mark.parametrize("mutate", FIXED, ids=lambda mutate: mutate.__name__)
def test_a_broken_rule_is_caught_in_a_fixed_run(mutate, monkeypatch):
    assert _wrong(FIXED[mutate], fixed=True) == []
    mutate(monkeypatch)
    assert_caught(partial(_wrong, fixed=True), first=FIXED[mutate], runs=60)


@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_the_same_runs_are_right_with_all_rules(topology):
    assert [_wrong(number, topology) for number in range(15)] == [[]] * 15


def test_with_one_complete_state_less_something_is_missing(monkeypatch):
    def newest_only(listing, fragments, **_):
        return newest_done(listing, fragments)

    assert _wrong(0) == []
    monkeypatch.setattr(_elastic_publish, "kept_from", newest_only)
    assert any("needs it" in what for number in range(10) for what in _wrong(number))
