"""Every safety rule is needed: without it, some simulated run goes wrong, and the simulator's checks say so."""

import json
import random
from dataclasses import replace

import pytest
import torch
from faults_lab import HARMFUL, harmful

from diloco_core import CoreError, Elastic, ElasticExchange
from diloco_core._arithmetic._coded import encode_update
from diloco_core._arithmetic._sharded import adopt_shard
from diloco_core._elastic import _exchange as _exchange_elastic
from diloco_core._elastic import _joining
from diloco_core._elastic._life import _life
from diloco_core._elastic._records import _records as _elastic_records
from diloco_core._elastic._records._keys import Delta, deltas, done_key, inner_key, shard_key
from diloco_core._elastic._records._records import Commit, Rollback
from diloco_core._elastic._records._rules import newest_done
from diloco_core._elastic._repair import read_commit
from diloco_core._elastic._round import _membership
from diloco_core._elastic._round._shares import Shares
from diloco_core._elastic._states import _publish as _elastic_publish
from diloco_core._elastic._sync import _adopt as _elastic_adopt
from diloco_core._elastic._sync import _catchup as _elastic_catchup
from diloco_core._elastic._sync import _compute
from diloco_core._elastic._sync import _published as _published_shards
from diloco_core._elastic._sync._adopt import Adoption
from diloco_core._elastic._sync._sync import ElasticSync
from diloco_core._outer import _fragment
from diloco_core._store import _reread
from diloco_core._store._patient import Patient
from diloco_core._wire import _published
from diloco_core._wire._coded import CodedShard
from diloco_core.testing import (
    Fault,
    Schedule,
    SimulatedStore,
    SimulatedTraining,
    broken_promises,
    simulate,
    violations,
)
from diloco_core.testing._checks import read_log


def _wrong(number, topology="sharded"):
    """What goes wrong in the simulated run with this number."""
    chance = random.Random(number)
    faults = harmful(chance, 7)
    training, store, broken = SimulatedTraining(syncs=5, sizes=(40,)), SimulatedStore(), []
    store.after_delete = lambda keys: broken.extend(broken_promises(store, keys))
    starts = [chance.choice([0.0, 1.0, 25.0]) for _ in range(3)]
    schedule = Schedule(
        3, seed=number, starts=starts, faults=faults, restart_after=2.0, latency=0.3
    )
    elastic = Elastic(2, grace=8.0, topology=topology, retention=2, publish_every=2)
    outcome = simulate(training, schedule, elastic, store=store, limit=5000.0)
    return violations(outcome, training) + broken


def decide_from_own_listing(monkeypatch):
    wait = ElasticSync._wait

    def mutant(self):
        found = wait(self)
        chosen = self._round.valid(self._life.store.list(deltas(self._sync)))
        if not isinstance(found, tuple) or not chosen:
            return found
        members = tuple(chosen.values())
        positions = self._progress.counting(members)
        return Commit(
            self._sync,
            self._index,
            self._base,
            self._life.previous,
            members,
            positions,
            self._progress.outer_steps + 1,
            run=self._life.run,
        ), found[1]

    monkeypatch.setattr(ElasticSync, "_wait", mutant)


def no_incarnation(monkeypatch):
    monkeypatch.setattr(_joining, "claim", lambda store, rank, run: (1, b""))
    monkeypatch.setattr(_exchange_elastic, "check_claim", lambda life: None)
    monkeypatch.setattr(_exchange_elastic, "watch_claim", lambda life: None)


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

    leaves = ElasticSync._leaves

    def act_then_put(self, decision):
        left = leaves(self, decision)
        if self._life.store.held is not None:
            key, whole = self._life.store.held
            put(self._life.store, key, lambda: whole)
        return left

    monkeypatch.setattr(Patient, "put", late)
    monkeypatch.setattr(Patient, "held", None, raising=False)
    monkeypatch.setattr(Patient, "list", listed_with_own)
    monkeypatch.setattr(ElasticSync, "_leaves", act_then_put)


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
    def skip(life):
        while isinstance(found := read_commit(life, life.sync + 1), tuple):
            life.standing.skip(*found)
        return found

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
            _elastic_adopt.write_done(self._life, self._commit)
        return run(self)

    monkeypatch.setattr(Adoption, "run", early)


MUTANTS = {  # with the number of the first run that shows it, as a rule: looked at first, since others take long
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
_CLUMSY = ("AttributeError", "NameError", "TypeError", "ValueError", "ZeroDivisionError")


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_broken_rule_is_caught(mutate, monkeypatch):
    torch.set_num_threads(1)
    mutate(monkeypatch)
    first = MUTANTS[mutate]
    wrong = next(filter(None, map(_wrong, [*range(first, 60), *range(first)])), None)
    assert wrong, "60 simulated runs found nothing wrong"
    assert not any(name in text for text in wrong for name in _CLUMSY), f"not the rule: {wrong}"


@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_the_same_runs_are_right_with_all_rules(topology):
    torch.set_num_threads(1)
    assert [_wrong(number, topology) for number in range(15)] == [[]] * 15


def _wrong_after_damage(number):
    """What goes wrong where bits flip on their way and objects rot; whoever cannot go on stops by name."""
    chance = random.Random(number)
    kinds = ("flip", "flip", "rot", "zombie", "kill before")
    faults = [
        Fault(chance.randrange(3), 1, chance.randint(8, 90), chance.choice(kinds), 30.0)
        for _ in range(6)
    ]
    training, store = SimulatedTraining(syncs=6, sizes=(40,), save_every=1), SimulatedStore()
    schedule = Schedule(3, seed=number, faults=faults, restart_after=2.0, latency=0.05)
    elastic = Elastic(2, grace=8.0, topology="sharded", retention=1)
    outcome = simulate(training, schedule, elastic, store=store, limit=5000.0, sync_timeout=200.0)
    raw = [repr(error) for error in outcome.errors().values() if not isinstance(error, CoreError)]
    wrong = [
        what
        for what in violations(outcome, training)
        if " raised " not in what and "not every rank" not in what
    ]
    return raw + wrong


def no_checksum_of_records(monkeypatch):
    def unsealed(kind, key, data, origin):
        return json.loads(data)

    monkeypatch.setattr(_elastic_records, "unseal", unsealed)


def no_checksum_of_shards(monkeypatch):
    def adopt(self, reader, origin, scratch):
        values = self._values_of(reader, origin)
        adopt_shard(
            self._job,
            self.number,
            lambda piece, out: (values.read(out), out)[1],
            self._chunk_bytes,
            scratch,
        )
        return _published._end(reader, origin)

    monkeypatch.setattr(_published.Shard, "adopt", adopt)


@pytest.mark.parametrize(
    "mutate", [no_checksum_of_records, no_checksum_of_shards], ids=lambda mutate: mutate.__name__
)
def test_without_a_checksum_damage_is_caught(mutate, monkeypatch):
    torch.set_num_threads(1)
    mutate(monkeypatch)
    assert any(_wrong_after_damage(number) for number in range(60)), (
        "60 simulated runs found nothing wrong"
    )


def test_the_same_damage_is_harmless_with_all_rules():
    torch.set_num_threads(1)
    assert [_wrong_after_damage(number) for number in range(15)] == [[]] * 15


def no_second_reading(monkeypatch):
    monkeypatch.setattr(_reread, "REREADS", ())


def test_without_a_second_reading_a_flipped_bit_costs_a_life(monkeypatch):
    def lives():
        faults = [
            Fault(rank, 1, operation, "flip") for rank in range(3) for operation in (9, 30, 60)
        ]
        outcome = simulate(
            SimulatedTraining(syncs=6, sizes=(40,)),
            Schedule(3, faults=faults),
            Elastic(2, grace=8.0),
        )
        return outcome.errors()

    torch.set_num_threads(1)
    assert lives() == {}
    no_second_reading(monkeypatch)
    assert lives() != {}


def test_with_one_complete_state_less_something_is_missing(monkeypatch):
    def newest_only(listing, fragments, **_):
        return newest_done(listing, fragments)

    torch.set_num_threads(1)
    assert _wrong(0) == []
    monkeypatch.setattr(_elastic_publish, "kept_from", newest_only)
    assert any("needs it" in what for number in range(10) for what in _wrong(number))


def _wrong_encoded(number):
    """What goes wrong where state is published encoded, and replicas are late, die, and come back."""
    chance = random.Random(number)
    faults = [
        Fault(
            chance.randrange(3),
            1,
            chance.randint(10, 130),
            chance.choice((*HARMFUL, "flip")),
            30.0,
        )
        for _ in range(5)
    ]
    training, store, broken = (
        SimulatedTraining(syncs=8, sizes=(100,), state_codec="e2m1", full_state_every=3),
        SimulatedStore(),
        [],
    )
    store.after_delete = lambda keys: broken.extend(broken_promises(store, keys))
    starts = [0.0, 0.0, chance.choice([0.0, 9.0])]
    schedule = Schedule(
        3, seed=number, starts=starts, faults=faults, restart_after=2.0, latency=0.1
    )
    elastic = Elastic(2, grace=6.0, topology="sharded", retention=1)
    outcome = simulate(training, schedule, elastic, store=store, limit=5000.0)
    return violations(outcome, training) + broken


def private_residual(monkeypatch):
    """What a change has lost is kept by the owner, and not published."""

    def encode(self, outer, coded, piece, old):
        lost, state = coded.__dict__.setdefault("lost", {}), outer.tensors(piece)
        update = encode_update(coded.codec, old, self.destination(piece), lost.get(piece))
        encoded = {name: coded.codec.encode(values) for name, values in state.items()}
        for name, data in encoded.items():
            coded.codec.decode(data, state[name])
        lost[piece] = update.residual
        coded.keep(piece, update.data, encoded)

    monkeypatch.setattr(_fragment.Fragment, "_encode_update", encode)


def the_owner_keeps_its_exact_values(monkeypatch):
    encode = _fragment.encode_update

    def exact(codec, old, new, residual):
        before = new.clone()
        update = encode(codec, old, new, residual)
        new.copy_(before)
        return update

    monkeypatch.setattr(_fragment, "encode_update", exact)


def _without_sums(monkeypatch):
    """Nobody compares what comes of a change with what its owner holds, which would make a life load again."""

    def add(self, reader, origin, expected):
        data, offset = self._update.read(reader, origin, self._chunk_bytes), 0
        for chunk in self._chunks():
            values = self._job.destination(chunk)
            offset = self._update.add(data, chunk, offset, values)
            self._job.adopt(chunk, values)
        return self.end(reader, origin)

    monkeypatch.setattr(CodedShard, "_add", add)


def start_from_a_state_that_is_not_whole(monkeypatch):
    """A life takes the newest change for the whole state: it adds it to the values that it begins with."""
    _without_sums(monkeypatch)
    monkeypatch.setattr(_life, "made_of", lambda sync, *_: [sync])


def collect_whole_states_too_early(monkeypatch):
    monkeypatch.setattr(
        _elastic_publish, "states_kept_from", lambda listing, fragments, kept, **_: kept
    )


def collect_changes_that_are_needed(monkeypatch):
    def newest(listing, fragments, kept, **_):
        return newest_done(listing, fragments)

    monkeypatch.setattr(_elastic_publish, "states_kept_from", newest)


def add_to_a_stale_base(monkeypatch):
    """A life that has begun to compute a shard adds the published change to what it has computed so far."""
    _without_sums(monkeypatch)
    monkeypatch.setattr(_published_shards, "read_values", lambda *_, **__: None)
    monkeypatch.setattr(_compute.Computation, "_is_same", lambda self, shard: False)


ENCODED = {  # with the first run that shows it, as a rule
    private_residual: 0,
    the_owner_keeps_its_exact_values: 0,
    start_from_a_state_that_is_not_whole: 0,
    add_to_a_stale_base: 0,
    collect_whole_states_too_early: 0,
    collect_changes_that_are_needed: 0,
}


@pytest.mark.parametrize("mutate", ENCODED, ids=lambda mutate: mutate.__name__)
def test_a_broken_rule_of_encoded_state_is_caught(mutate, monkeypatch):
    torch.set_num_threads(1)
    mutate(monkeypatch)
    first = ENCODED[mutate]
    wrong = next(filter(None, map(_wrong_encoded, [*range(first, 20), *range(first)])), None)
    assert wrong, "20 simulated runs found nothing wrong"
    assert not any(name in text for text in wrong for name in _CLUMSY), f"not the rule: {wrong}"


def test_the_same_runs_of_encoded_state_are_right_with_all_rules():
    torch.set_num_threads(1)
    assert [_wrong_encoded(number) for number in range(6)] == [[]] * 6


def _going_back(number):
    """What goes wrong where rank 0 sleeps in a step while rank 1, which has agreed to it, goes back to older states."""
    before, store = SimulatedTraining(syncs=1, sizes=(40, 30)), SimulatedStore()
    settings = Elastic(1, grace=5.0, topology="sharded")
    simulate(before, Schedule(2, seed=number, latency=0.01), settings, store=store)
    training = SimulatedTraining(
        syncs=24, sizes=(40, 30), salts=dict(before.salts), pauses={(0, 9): 90.0}
    )

    def train(node):
        if node.rank == 1 or node.life > 1:
            node.exchange.settings = replace(settings, resume="newest-whole")
        if (node.rank, node.life) == (1, 1):
            node.sleep(60.0)
            newest = max(
                sync for sync in range(1, 40) if done_key(sync, (sync - 1) % 2) in store.objects
            )
            key = shard_key(newest, (newest - 1) % 2, 0, "")
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


def _asleep(number):
    """What goes wrong where a replica that saves its inner state at every sync sleeps, and is replaced meanwhile."""
    training, store = SimulatedTraining(syncs=6, sizes=(40,), save_every=1), SimulatedStore()
    faults = [Fault(1, 1, 48 + 5 * number, "zombie", 2.0)]
    schedule = Schedule(3, seed=number, faults=faults, restart_after=0.5, latency=0.01)
    return violations(simulate(training, schedule, Elastic(2, grace=3.0), store=store), training)


def no_fence_after_a_rollback(monkeypatch):
    for module in (_exchange_elastic, _elastic_catchup):
        monkeypatch.setattr(module, "obey_rollback", lambda life, rollback: None)


def saving_without_looking_for_a_successor(monkeypatch):
    def mutant(self, parts):
        life = self._running()
        key = inner_key(life.rank, life.epoch, life.sync)
        life.store.put(key, lambda: parts(key))

    monkeypatch.setattr(ElasticExchange, "save_inner", mutant)


@pytest.mark.parametrize(
    ("mutate", "wrong"),
    [(no_fence_after_a_rollback, _going_back), (saving_without_looking_for_a_successor, _asleep)],
    ids=lambda argument: argument.__name__,
)
def test_an_earlier_life_that_goes_on_is_caught(mutate, wrong, monkeypatch):
    torch.set_num_threads(1)
    assert [wrong(number) for number in range(2)] == [[]] * 2
    mutate(monkeypatch)
    assert all(wrong(number) for number in range(2)), "every schedule shows it"
