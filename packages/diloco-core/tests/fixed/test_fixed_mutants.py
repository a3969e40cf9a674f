"""Wrong versions of fixed membership are caught in both kinds of stores."""

import math
import random

import pytest
from faults_lab import assert_caught
from fixed_lab import random_ended_run, random_run
from simulated import Fault
from strict_lab import Generations
from training_lab import identical

from diloco_core._run import _claims, _exchange, _joining
from diloco_core._run._generations import _entering
from diloco_core._run._generations._gathering import Gathering
from diloco_core._run._generations._names import folder
from diloco_core._run._incarnation._incarnation import Incarnation
from diloco_core._run._policy import _ends
from diloco_core._run._round._shares import Shares
from diloco_core._run._states import _publish, _rollback
from diloco_core._run._sync import _adopt
from diloco_core._store._patient import Patient

KINDS = ("kill before", "kill after", "zombie", "lose answer", "tear", "delay")
MOST = 120


def others_take_over_shards(monkeypatch):
    """Each rank's own part of a contribution is known to nobody else."""
    turn = Shares.turn

    def soon(self, shard):
        found = turn(self, shard)
        return self.grace if math.isinf(found) else found

    monkeypatch.setattr(Shares, "turn", soon)


def _puts(monkeypatch, written):
    """Puts what must be created, if ``written`` is true of its key and its bytes."""
    create = Patient.create

    def mutant(self, key, parts):
        data = parts()
        data = data if isinstance(data, bytes) else b"".join(map(bytes, data))
        if not written(key, data):
            return create(self, key, lambda: data)
        self.put(key, lambda: [data])
        return True

    monkeypatch.setattr(Patient, "create", mutant)


def records_are_put(monkeypatch):
    """The last one to write a record decides, in place of the first one."""
    _puts(monkeypatch, lambda key, _: key.startswith("commits/"))


def ends_are_put(monkeypatch):
    """A replica that gives a rank up takes back what was decided meanwhile."""
    _puts(monkeypatch, lambda key, data: key.startswith("commits/") and b'"end"' in data)


def shards_are_put(monkeypatch):
    """A shard changes while others read it."""
    _puts(monkeypatch, lambda key, _: key.startswith("state/") and key.endswith(".safetensors"))


def an_unknown_answer_counts_as_won(monkeypatch):
    """Count what this incarnation has computed, whatever the store holds."""
    create = Incarnation.create

    def mutant(self, key, parts):
        create(self, key, parts)
        return True

    monkeypatch.setattr(Incarnation, "create", mutant)


def no_incarnation_is_fenced(monkeypatch):
    for module in (_claims, _exchange, _ends, _adopt):
        monkeypatch.setattr(module, "check_claim", lambda incarnation: None)


def everything_is_deleted_at_the_commit(monkeypatch):
    """Contributions and states from which others still compute."""
    collectable = _publish.collectable

    def mutant(keys, *, last, kept, **options):
        return collectable(keys, last=last, kept=[last] * len(kept), **options)

    monkeypatch.setattr(_publish, "collectable", mutant)


def nobody_obeys_an_end(monkeypatch):
    for module in (_ends, _joining, _rollback):
        for name in {"obey_end", "refuse_ended"} & vars(module).keys():
            monkeypatch.setattr(module, name, lambda *_, **__: None)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mutant", "first"),
    [
        (others_take_over_shards, 0),
        (shards_are_put, 13),
        (an_unknown_answer_counts_as_won, 13),
        (no_incarnation_is_fenced, 34),
        (everything_is_deleted_at_the_commit, 0),
    ],
)
def test_it_is_caught(mutant, first):
    assert_caught(lambda seed: random_run(seed, KINDS), mutant, first=first, runs=MOST)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mutant", "first"), [(records_are_put, 5), (ends_are_put, 5), (nobody_obeys_an_end, 1)]
)
def test_it_is_caught_where_a_run_ends(mutant, first):
    assert_caught(random_ended_run, mutant, first=first, runs=MOST)


HANGS = [0.1, 1.0, 20.0, 110.0, 300.0, 700.0]


def launches_that_hang(seed):
    """A run is resumed by two or three launches, whose processes hang now and then for a while."""
    choose = random.Random(seed)
    run, whole = Generations(2), Generations(2).live()
    run.live(until=choose.choice([1, 2, 3]))
    processes = []
    for launch in range(choose.choice([2, 2, 3])):
        start = launch * choose.choice([0.02, 0.3, 2.0, 99.0, 130.0, 250.0])
        for rank in range(2):
            faults = [
                Fault(rank, 1, choose.randint(5, 60), "zombie", choose.choice(HANGS))
                for _ in range(choose.choice([0, 0, 1, 2]))
            ]
            begins = start + choose.random() * choose.choice([0.01, 0.5, 5.0])
            processes.append((rank, begins, faults, True))
    results = [*run.simulate(processes, seed, until=6), *whole]
    same = identical([result for result in results if isinstance(result, dict)])
    return run.store.differing + ["replicas have ended with other values"] * (not same)


def generations_are_named_by_their_number_alone(monkeypatch):
    monkeypatch.setattr(
        _entering, "folder", lambda number, nonces: folder(number, ["0" * 16] * len(nonces))
    )


def whoever_is_seen_has_met(monkeypatch):
    look = Gathering._look

    def mutant(self):
        look(self)
        return [rank for rank, nonce in enumerate(self._said) if not nonce]

    monkeypatch.setattr(Gathering, "_look", mutant)


def nobody_waits_for_its_turn(monkeypatch):
    monkeypatch.setattr(Gathering, "_await_turn", lambda _: None)


def nobody_looks_whether_it_was_replaced(monkeypatch):
    monkeypatch.setattr(Gathering, "check", lambda _: None)


# The rules of the meeting stand in for each other: a single one that is missing was caught in none
# of 200 seeds.
MEETINGS = [
    ((whoever_is_seen_has_met, nobody_looks_whether_it_was_replaced), 1),
    ((nobody_waits_for_its_turn,), 9),
    ((nobody_waits_for_its_turn, nobody_looks_whether_it_was_replaced), 2),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("mutants", "seed"), MEETINGS)
def test_a_meeting_without_rules_is_caught(mutants, seed, monkeypatch):
    assert launches_that_hang(seed) == []
    generations_are_named_by_their_number_alone(monkeypatch)
    for mutant in mutants:
        mutant(monkeypatch)
    assert launches_that_hang(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(n, n + 50) for n in range(0, 400, 50)], ids=str)
def test_launches_that_hang_are_harmless_with_all_rules(seeds):
    for seed in seeds:
        assert launches_that_hang(seed) == [], seed
