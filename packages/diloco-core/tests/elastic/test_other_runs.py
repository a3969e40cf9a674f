"""Nothing of another run under the same prefix becomes part of a model, and stray files stay."""

import pytest
from damage_lab import Watched, run_of, store_of
from simulated import (
    OtherTraining,
    Schedule,
    SimulatedStore,
    SimulatedTraining,
    flawless,
    once,
    simulate,
    violations,
)

from diloco_core import CorruptedObjectError, Elastic, RunExistsError
from diloco_core._run._records._keys import commit_sync
from diloco_core._run._records._records import read_record

# When the prefix is emptied and used again, and when a replica of the new run comes late.
_EMPTIED, _LATE = 30.0, 44.0


class _Reused:
    """Rank 2 trains alone; then ranks 0 and 1 empty the prefix and begin another run there.

    Args:
        operation: At which of its requests from the 20th second on it stands still for 15 seconds,
            with ``part`` of its key; "" for none.
    """

    def __init__(self, topology, operation="", part=""):
        self.store, self.late, self.hang = SimulatedStore(), [], (operation, part)
        self.new = SimulatedTraining(syncs=14, sizes=(12, 9), save_every=1)
        self.old = OtherTraining(syncs=60, sizes=(12, 9), save_every=1)
        every = 1 if topology == "gather" else None
        settings = Elastic(1, grace=3.0, topology=topology, publish_every=every)
        schedule = Schedule(3, starts=[_EMPTIED, _LATE, 0.0], latency=0.01, restart_after=1.0)
        options = {"store": self.store, "limit": 2000.0, "most_incarnations": 2}
        self.outcome = simulate(self.train, schedule, settings, **options)

    def train(self, node):
        if (node.rank, node.incarnation) == (0, 1):
            for key in list(self.store.objects):
                self.store.remove(key)
            self.store.decided.clear()
        if (node.rank, node.incarnation) != (2, 1):
            return self.new(node)
        hung, clock = [], node.connection.clock

        def stand_still(keys):
            if clock() >= 20.0 and self.hang[1] in str(keys) and not hung:
                hung.append(keys)
                node.sleep(15.0)

        for kind in ("put", "create", "delete"):
            node.before(kind, lambda _, kind=kind: self.late.append((kind, clock())))
        if self.hang[0]:
            node.before(self.hang[0], stand_still)
        return self.old(node)

    def written(self):
        """Return when rank 2 wrote something to the prefix of the new run, and how."""
        return [(kind, time) for kind, time in self.late if time > _EMPTIED]

    def errors(self):
        """Return the errors of the incarnations of the new run."""
        return {key: error for key, error in self.outcome.errors().items() if key != (2, 1)}

    def wrong(self):
        """Return what is wrong with the new run, except for incarnations that ended by an error."""
        run = run_of(self.store)
        for key, data in list(self.store.decided.items()):
            sync = commit_sync(key)
            if sync is not None and read_record(data, sync, key).run != run:
                del self.store.decided[key]
        return [
            what
            for what in violations(self.outcome, self.new)
            if not what.startswith(("incarnation ", "not every rank"))
        ]


def _named(errors):
    """Say whether all errors tell what has happened, and what is to be done."""
    reason, kinds = "record of another run", {type(error) for error in errors.values()}
    texts = map(str, errors.values())
    return kinds <= {RunExistsError} and all(reason in text and "Stop" in text for text in texts)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("topology", "operation", "part", "late"),
    [
        ("sharded", "list", "deltas/", []),
        ("sharded", "put", "deltas/", ["put"]),
        ("gather", "create", "commits/", ["create"]),
        ("sharded", "create", ".done.json", ["create"]),
        ("gather", "create", ".safetensors", ["create"]),
        ("gather", "put", "inner/", ["put"]),
        ("sharded", "delete", "state/", ["delete"]),
    ],
)
def test_a_sleeper_of_the_run_before_writes_nothing_more(topology, operation, part, late):
    reused = _Reused(topology, operation, part)
    assert reused.wrong() == []
    error = reused.outcome.results[2, 1]
    assert isinstance(error, RunExistsError)
    assert "now belongs to another run" in str(error)
    # One request may have been under way. What it has written is found out, or does not matter.
    assert [kind for kind, _ in reused.written()] == late
    kinds = (RunExistsError, CorruptedObjectError)
    assert all(isinstance(error, kinds) for error in reused.errors().values())
    if not late:
        assert reused.errors() == {}
        assert {0, 1} <= {rank for rank, _ in reused.outcome.results}
    if part in {"commits/", ".done.json"}:  # the new run comes to that sync
        assert _named({(0, 1): reused.errors()[0, 1]})


@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_a_replica_of_the_run_before_stops_soon(topology):
    """For a grace it does not look, and goes on with its own log."""
    reused = _Reused(topology)
    assert reused.wrong() == []
    assert isinstance(reused.outcome.results[2, 1], RunExistsError)
    # A grace and the sync under way.
    assert max(time for _, time in reused.written()) < _EMPTIED + 3.0 + 3.0
    assert reused.errors(), "it has written records of syncs that the new run comes to"
    assert _named(reused.errors())


@pytest.fixture(scope="module", params=["sharded", "gather"])
def two(request):
    """Return what a run has left, and all that a longer one of the same model has written."""
    every = 1 if request.param == "gather" else None
    settings = Elastic(2, grace=5.0, topology=request.param, publish_every=every)
    written, training = {}, SimulatedTraining(syncs=4, sizes=(12, 9), save_every=2)
    old = flawless(training, 2, settings).store
    other = Watched(written.__setitem__)
    flawless(OtherTraining(syncs=6, sizes=(12, 9), save_every=2), 2, settings, store=other)
    return settings, training, old.objects, written


def _copies(kind, old, other):
    """Objects of one kind, of the same syncs and of later ones, as copied from the other run."""
    taken = {key: data for key, data in other.items() if key.startswith(kind.split(" ")[0])}
    if kind == "state/ done":
        taken = {key: data for key, data in taken.items() if key.endswith(".json")}
    if kind == "state/ shards":
        taken = {key: data for key, data in taken.items() if key.endswith(".safetensors")}
    if kind == "deltas/ renamed":  # under the keys of the old ones
        mine = [key for key in old if key.startswith("deltas/") and "hint" not in key]
        taken = {a: other[b] for a in mine for b in other if a[:22] == b[:22] and "hint" not in b}
        assert taken
    return taken


@pytest.mark.sampled
@pytest.mark.parametrize("newer", [False, True], ids=["in place of the own", "newer"])
@pytest.mark.parametrize(
    "kind",
    ["state/", "state/ done", "state/ shards", "deltas/", "deltas/ renamed", "commits/", "inner/"],
)
def test_copies_of_another_run_never_become_another_model(two, kind, newer, caplog):
    settings, before, old, other = two
    store = store_of(old)
    copied = {key: data for key, data in _copies(kind, old, other).items() if (key in old) != newer}
    for key, data in copied.items():
        store.damage(key, data)
    training = SimulatedTraining(syncs=6, sizes=(12, 9), salts=dict(before.salts))
    outcome = once(training, Schedule(2, seed=1, latency=0.01), settings, store=store)
    for error in outcome.errors().values():
        assert isinstance(error, (RunExistsError, CorruptedObjectError)), error
    wrong = violations(outcome, training)
    assert [what for what in wrong if not what.startswith(("incarnation ", "not every rank"))] == []
    if kind in {"inner/", "deltas/"}:  # what one would like to have, and can do without
        assert outcome.errors() == {}
    if kind == "inner/" and newer:
        assert "written under another key or in another run" in caplog.text
    if kind in {"commits/", "state/ done"}:
        records = (key for key in [*copied, *old] if key.endswith(".json"))
        newest = max(key for key in records if key.startswith(kind.split()[0]))
        if newest in copied:  # which is read
            assert outcome.errors()
            assert _named(outcome.errors())
        assert copied.items() <= store.objects.items(), "they stay as they are"


@pytest.mark.parametrize("emptied", [True, False])
def test_who_meets_another_run_says_nothing_there(emptied):
    """It has just looked at the manifest when it finds a record of another run."""
    store, other = SimulatedStore(), SimulatedStore()
    settings = Elastic(1, grace=50.0, topology="sharded")
    simulate(OtherTraining(syncs=4, sizes=(12,)), Schedule(1), settings, store=other)

    class Meddled(SimulatedTraining):
        @staticmethod
        def gradient(rank, incarnation, step, size):
            if step == 5:
                for key in ("commits/00000003.json", *(["manifest.json"] * emptied)):
                    store.damage(key, other.objects[key])
            return SimulatedTraining.gradient(rank, incarnation, step, size)

    training = Meddled(syncs=6, sizes=(12,), save_every=0)
    outcome = once(training, Schedule(1), settings, store=store)
    assert isinstance(outcome.results[0, 1], RunExistsError)
    assert any(key.endswith(".leave") for key in store.objects) != emptied
    assert not getattr(outcome.results[0, 1], "__notes__", [])


_NONCE = "0123456789abcdef"
_STRAYS = {
    "claims": "a.json 00000.json.bak 00000/ 00000/README 00000/0001.json.bak 00000/001.json",
    "commits": "00000001.json.bak 1.json 00000001/a 00000001.json/a",
    "deltas": "00000001/ 00000001/notes.txt 00000001/hint.00000.0001.dance 00000002/a/b",
    "state": "00000001/a 00000001/000.done.json.bak 00000001/0.0.safetensors 99999999/a",
    "initial": f"a/000.00000.safetensors {_NONCE}/notes.txt {_NONCE}/000.0.safetensors",
    "kept": "000.bak state/00000001/000.bak state/00000001/a",
    "inner": "00000/notes.txt 00000/1.1.safetensors 00000/9999.99999999.safetensors.bak",
    "unsynced": "",
}
_STRAYS = {folder: ["", "notes.txt", *names.split()] for folder, names in _STRAYS.items()}


@pytest.mark.sampled
@pytest.mark.parametrize("folder", _STRAYS)
def test_other_files_are_ignored_and_stay(folder, publishing):
    store = SimulatedStore()
    for name in _STRAYS[folder]:
        store.write(f"{folder}/{name}", b"mine")
    settings = publishing(2, grace=5.0, retention=1)
    first = SimulatedTraining(syncs=5, sizes=(12, 9), save_every=1)
    flawless(first, 2, settings, store=store, most_incarnations=1)
    again = SimulatedTraining(syncs=7, sizes=(12, 9), save_every=1, salts=dict(first.salts))
    flawless(again, 2, settings, store=store, most_incarnations=1)
    kept = [key for key, data in store.objects.items() if data == b"mine"]
    assert sorted(kept) == sorted(f"{folder}/{name}" for name in _STRAYS[folder])
    assert not any(key.endswith("tensors") for key in store.below("deltas/00000001")), "collected"
