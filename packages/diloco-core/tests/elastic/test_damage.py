"""Objects of an elastic run with one flipped bit, cut short, or gone: the model is the same.

Only the manifest cannot be made again from anything else; without it there is an error with a name.
"""

import random
from dataclasses import replace

import pytest
from damage_lab import Watched, flip, store_of
from simulated import (
    DAMAGES,
    Fault,
    Schedule,
    SimulatedStore,
    SimulatedTraining,
    flawless,
    once,
    simulate,
    violations,
)

from diloco_core import CoreError, CorruptedObjectError, Elastic, RunExistsError
from diloco_core._run._records._keys import MANIFEST
from diloco_core._run._records._rules import made_of

_SYNCS = 4


def _but(wrong, *by_rule):
    return [what for what in wrong if not any(part in what for part in by_rule)]


class _Run:
    """A run that has stopped, to be damaged and gone on with."""

    def __init__(self, topology, end, number=0, whole_every=None):
        self.number = number
        self.whole_every = whole_every or 1
        self.options = {"sizes": (12, 9), "sync_every": 2}
        if whole_every is not None:
            self.options |= {"state_codec": "e2m1", "full_state_every": whole_every}
        every = 1 if topology == "gather" else None
        self.settings = Elastic(2, grace=5.0, topology=topology, publish_every=every)
        self.training = SimulatedTraining(_SYNCS, save_every=2, **self.options)
        self.objects = {}

        def note(key, data):
            if key == "commits/00000003.json":  # nothing is published of it yet
                self.objects = dict(store.objects)

        store = Watched(note)
        flawless(self.training, 2, self.settings, store=store)
        if end == "stopped":
            self.objects = store.objects
        self.needed = [key for key in self.objects if self._is_needed(key)]

    def _done(self, sync, fragment):
        return f"state/{sync:08}/{fragment:03}.done.json" in self.objects

    def _is_needed(self, key):
        """Nothing else says what a sync is made from before a later state is published."""
        folder, _, name = key.partition("/")
        if folder == "state" and name.endswith(".safetensors"):
            # Of encoded state, the newest is made of changes since the last whole one, which are
            # made from nothing else.
            fragment = int(name.split("/")[1][:3])
            newest = max(at for at in range(1, _SYNCS + 2) if self._done(at, fragment))
            return int(name[:8]) in made_of(newest, fragment, 2, self.whole_every)[:-1]
        if folder not in {"commits", "deltas", "initial"} or "hint" in name:
            return False
        sync = 0 if folder == "initial" else int(name[:8])
        fragment = int(name.split("/")[1][:3]) if folder == "initial" else (sync - 1) % 2
        return not any(self._done(at, fragment) for at in range(sync, _SYNCS + 2))

    def resumed(self, key, data):
        """The errors with other bytes in place of an object, or none, and what else is wrong."""
        store = store_of(self.objects)
        store.remove(key) if data is None else store.damage(key, data)
        training = SimulatedTraining(_SYNCS + 2, salts=dict(self.training.salts), **self.options)
        schedule = Schedule(2, seed=1, latency=0.01)
        outcome = once(training, schedule, self.settings, store=store)
        return outcome.errors(), _but(violations(outcome, training), " raised ", "not every rank")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("sharded", "stopped", 0), marks=pytest.mark.slow),
        ("sharded", "killed", 1),
        ("gather", "stopped", 2),
        pytest.param(("gather", "killed", 3), marks=pytest.mark.slow),
        pytest.param(("sharded", "stopped", 0, 2), marks=pytest.mark.slow),
        ("sharded", "stopped", 2, 4),
    ],
    ids=lambda case: "-".join(map(str, (*case[:2], *case[3:]))),
)
def run(request):
    return _Run(*request.param)


def _kinds(run):
    """A newest object of every kind; of contributions and records all."""
    chosen = {}
    for key in sorted(run.objects):
        folder, _, name = key.partition("/")
        chosen[folder, name.endswith(".json"), name.split(".")[0][-3:]] = key
    return sorted({*chosen.values(), *run.needed})


def _check(run, key, damaged):
    errors, wrong = run.resumed(key, damaged)
    named = {type(error) for error in errors.values()}
    if key == MANIFEST:
        assert named <= {CorruptedObjectError, RunExistsError}, (key, errors)
    elif key in run.needed:
        assert named <= {CorruptedObjectError}, (key, errors)
    else:
        assert errors == {}, (key, errors)
    assert wrong == [], (key, wrong)


def _damages(number, data):
    yield flip(data, 8009 * (number + 1) % (8 * len(data)))
    yield data[: 89 * number % len(data)]
    yield None


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_object_at_rest(run, whole):
    """Every object is damaged in one of three ways, or in each; another one in each kind of run."""
    for number, key in enumerate(_kinds(run)):
        damages = list(_damages(number, run.objects[key]))
        for damaged in damages if whole else [damages[(number + run.number) % 3]]:
            _check(run, key, damaged)


def _random(number, topology, kinds):
    chance = random.Random(f"{number}{topology}")
    faults = [
        Fault(
            chance.randrange(3), chance.randint(1, 2), chance.randint(5, 110),
            chance.choice(kinds), 20.0,
        )
        for _ in range(5)
    ]  # fmt: skip
    training, store = SimulatedTraining(syncs=6, sizes=(12, 9), save_every=2), SimulatedStore()
    every = 2 if topology == "gather" else None
    settings = Elastic(2, grace=4.0, topology=topology, publish_every=every)
    schedule = Schedule(3, seed=number, faults=faults, restart_after=1.0, latency=0.05)

    def train(node):
        resume = "newest-whole" if MANIFEST in store.objects else False
        node.exchange.settings = replace(settings, resume=resume)
        return training(node)

    options = {"store": store, "limit": 8000.0, "sync_timeout": 300.0}
    return simulate(train, schedule, settings, **options), training


@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_bits_that_flip_on_their_way_cost_nothing(topology, caplog):
    for number in range(5):
        outcome, training = _random(number, topology, ["flip", "stale list"])
        assert violations(outcome, training) == []
        assert len(outcome.results) == 3, "nobody had to start again"
    assert "reading again" in caplog.text
    for part in ("It will be computed again", "writing"):
        assert part not in caplog.text, "nobody is accused of what one reading brought"


@pytest.mark.parametrize("topology", ["sharded", "gather"])
@pytest.mark.parametrize("count", [5, pytest.param(400, marks=pytest.mark.slow)])
def test_whatever_rots_or_is_torn_no_other_model_comes_of_it(topology, count):
    """With resume="newest-whole" the run comes to its end, too, as long as any state is whole."""
    for number in range(count):
        outcome, training = _random(number, topology, [*DAMAGES, "kill before", "zombie", "flip"])
        assert all(isinstance(error, CoreError) for error in outcome.errors().values()), (
            outcome.errors()
        )
        # Without any whole state there is nothing to go on from: the initial one rotted before
        # another was complete.
        lost = any("nothing to go back to" in str(error) for error in outcome.errors().values())
        passed = (" raised ", "not every rank") if lost else (" raised ",)
        assert _but(violations(outcome, training), *passed) == [], number


def test_the_first_state_is_made_again_from_the_initial_one(publishing):
    """Nothing of a failed loading may stay: the first outer step begins without momentum."""
    settings = publishing(2, grace=5.0)
    before, store = SimulatedTraining(syncs=1, sizes=(40,)), SimulatedStore()
    simulate(before, 2, settings, store=store)
    store.damage("state/00000001/000.00001.safetensors", b"")
    training = SimulatedTraining(syncs=3, sizes=(40,), salts=dict(before.salts))
    flawless(training, 2, settings, store=store, most_incarnations=1)


def _harms_once(harmed, harm):
    """A store that harms an object before anybody has read it."""
    left = [harmed]

    def after(key, data):
        if key in left:
            left.clear()
            store.damage(key, harm(data))

    store = Watched(after)
    return store


@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_a_record_that_nobody_has_read_is_written_again_by_its_author(topology):
    key = "commits/00000002.json"
    training, store = SimulatedTraining(4, (40,)), _harms_once(key, lambda data: data[:30])
    settings = Elastic(2, grace=5.0, topology=topology)
    outcome = flawless(training, 3, settings, store=store)
    assert len(outcome.results) == 3, "nobody had to start again"
    assert store.objects[key] == store.decided[key]


@pytest.mark.sampled
@pytest.mark.parametrize("coding", [{}, {"state_codec": "e2m1", "full_state_every": 3}])
@pytest.mark.parametrize("members", [2, 3])
def test_values_that_are_damaged_before_others_adopt_them(members, coding):
    """Plain ones are in the model by then; changes are verified before they are added."""
    at = 45 if coding else 25
    store = _harms_once(
        "state/00000003/000.00001.safetensors", lambda data: flip(data, 8 * (len(data) - at))
    )
    training = SimulatedTraining(6, (70, 40), **coding)
    settings, schedule = Elastic(2, grace=5.0, topology="sharded"), Schedule(members, latency=0.01)
    flawless(training, schedule, settings, store=store, most_incarnations=1)
    reloaded = [report.reloaded for each in training.reports.values() for report in each]
    assert not (coding and any(reloaded))
