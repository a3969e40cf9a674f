"""Wrong ways to meet, and to go on, in a store that cannot decide are caught."""

import pytest
from damage_lab import flip
from generations_lab import Generations
from training_lab import identical

from diloco_core._run._generations import _carrying, _entering
from diloco_core._run._sync import _sync


def _wrong(run, results, whole):
    """What is wrong with a simulation: objects of one key with two contents, or results that are not those of a whole run."""
    ended = [result for result in [*results, *whole] if isinstance(result, dict)]
    found = list(run.store.differing)
    if not identical(ended):
        found.append("replicas have ended with other values")
    return found


def two_launches_that_resume():
    """All ranks are started twice, at nearly the same time."""
    found, whole = [], Generations(2).live()
    for gap in (0.0, 0.05, 0.4):
        run = Generations(2)
        run.live(until=2)
        launches = [(rank, start, [], True) for start in (0.0, gap) for rank in range(2)]
        found += _wrong(run, run.simulate(launches, until=6), whole)
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
    def mutant(life, key, _):
        return life.store.read(key, lambda reader: _bytes(reader))

    monkeypatch.setattr(_carrying, "verified", mutant)


def _bytes(reader):
    data = bytearray(reader.size)
    reader.read_into(0, memoryview(data))
    return bytes(data)


def a_sync_is_decided_without_all(monkeypatch):
    on_look = _sync.rounds.on_look

    def mutant(at, folder, *, overdue, expired):
        if folder is not None and at.rank in folder.chosen:
            return _sync.rounds.Create(tuple(folder.chosen.values()))
        return on_look(at, folder, overdue=overdue, expired=expired)

    monkeypatch.setattr(_sync.rounds, "on_look", mutant)


@pytest.mark.parametrize(
    ("mutant", "scenario"),
    [
        (nobody_asks_whether_the_others_have_ended, a_launch_beside_a_run_that_is_alive),
        (what_is_carried_is_not_verified, a_state_that_is_damaged),
        (a_sync_is_decided_without_all, two_launches_that_resume),
    ],
    ids=lambda argument: argument.__name__,
)
def test_it_is_caught(mutant, scenario, monkeypatch):
    assert scenario() == []
    mutant(monkeypatch)
    assert scenario()
