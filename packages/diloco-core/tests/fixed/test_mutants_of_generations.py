"""Wrong ways to meet, and to go on, in a store that cannot decide are caught."""

import random

import pytest
from damage_lab import flip
from simulated import Fault
from strict_lab import Generations
from training_lab import identical

from diloco_core._run._generations import _carrying, _entering
from diloco_core._run._generations._gathering import Gathering
from diloco_core._run._generations._names import folder


def _wrong(run, results, whole):
    """What is wrong with a simulation: objects of one key with two contents, or results that are
    not those of a whole run.
    """
    ended = [result for result in [*results, *whole] if isinstance(result, dict)]
    found = list(run.store.differing)
    if not identical(ended):
        found.append("replicas have ended with other values")
    return found


def a_launch_beside_a_run_that_is_alive():
    """All ranks are started again although none has ended."""
    run, whole = Generations(2, syncs=60), Generations(2, syncs=60).live()
    first = [(rank, 0.0, [], False) for rank in range(2)]
    second = [(rank, 8.0, [], True) for rank in range(2)]
    results = run.simulate([*first, *second], until=60)
    found = _wrong(run, results, whole)
    return found + ["the run was taken over"] * any(isinstance(each, dict) for each in results[2:])


def a_state_that_is_damaged():
    """The newest state of a run that has stopped has a wrong bit."""
    found, whole = [], Generations(2).live()
    for rank in range(2):
        run = Generations(2)
        run.live(until=3)
        (key,) = [
            key for key in run.keys("state/") if key.endswith(f"00003/000.{rank:05}.safetensors")
        ]
        run.store.objects[key] = flip(run.store.objects[key], 4 * len(run.store.objects[key]))
        found += _wrong(run, run.live(resume="newest-whole"), whole)
        before = dict(run.store.objects)
        found += ["damage was carried on"] * (key in before and len(run.begun()) > 2)
        damaged = [
            other
            for other in before
            if other != key
            and other.endswith(key.split("/", 2)[2])
            and before[other] == before.get(key)
        ]
        found += [f"{other} holds the damage" for other in damaged]
    return found


def nobody_asks_whether_the_others_have_ended(monkeypatch):
    monkeypatch.setattr(_entering, "check_stopped", lambda *_: None)


def what_is_carried_is_not_verified(monkeypatch):
    def mutant(incarnation, key, _):
        return incarnation.store.read(key, lambda reader: _bytes(reader))

    monkeypatch.setattr(_carrying, "verified", mutant)


def _bytes(reader):
    data = bytearray(reader.size)
    reader.read_into(0, memoryview(data))
    return bytes(data)


@pytest.mark.parametrize(
    ("mutant", "scenario"),
    [
        (nobody_asks_whether_the_others_have_ended, a_launch_beside_a_run_that_is_alive),
        (what_is_carried_is_not_verified, a_state_that_is_damaged),
    ],
    ids=lambda argument: argument.__name__,
)
def test_it_is_caught(mutant, scenario, monkeypatch):
    assert scenario() == []
    mutant(monkeypatch)
    assert scenario()


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
    return _wrong(run, run.simulate(processes, seed, until=6), whole)


HANGS = [0.1, 1.0, 20.0, 110.0, 300.0, 700.0]


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
    ((whoever_is_seen_has_met,), 8),
    ((nobody_waits_for_its_turn,), 9),
    ((nobody_waits_for_its_turn, nobody_looks_whether_it_was_replaced), 2),
]


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
